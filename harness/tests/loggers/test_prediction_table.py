"""Outputs of ``predict_step`` are a table, or a file beside it; no sample is lost or moved."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from harness.loggers.prediction_table import PredictionTable, columns_of, number_rows, to_plain
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Score:
    value: Any
    note: Any


RETURNED: list[tuple[Any, dict[str, Any]]] = [
    (torch.tensor([5, 6]), {"prediction": [5, 6]}),
    (torch.tensor([[1, 2], [3, 4]]), {"prediction.0": [1, 3], "prediction.1": [2, 4]}),
    (
        (torch.tensor([5, 6]), {"b": torch.tensor([[1], [2]])}),
        {"prediction.0": [5, 6], "prediction.1.b.0": [1, 2]},
    ),
    (
        {"a": [torch.tensor([i, i + 1]) for i in (1, 3)], "text": ["x", "y"]},
        {"a": [[1, 2], [3, 4]], "text": ["x", "y"]},
    ),
    # Detection: boxes of each image, of which the second has none.
    (
        [{"boxes": torch.ones(1, 2), "n": 1}, {"boxes": torch.ones(0, 2), "n": 0}],
        {"boxes": [[[1, 1]], []], "n": [1, 0]},
    ),
    ([torch.tensor([1, 2, 3]), torch.tensor([4])], {"prediction": [[1, 2, 3], [4]]}),
    (Pair(torch.tensor([1, 2]), ["x", "y"]), {"left": [1, 2], "right": ["x", "y"]}),
    ({"p": Score(torch.tensor([1, 2]), None)}, {"p.value": [1, 2]}),
    (torch.tensor([0.5, 2], dtype=torch.bfloat16), {"prediction": [0.5, 2]}),
    (np.array([[1.0], [2.0]]), {"prediction.0": [1, 2]}),
]


def test_what_predict_step_returns_becomes_columns() -> None:
    for returned, columns in RETURNED:
        assert columns_of(to_plain(returned), "", num_samples=2) == columns
    for returned in (torch.tensor(5), 5, np.float32(5)):  # the row of a single sample
        assert columns_of(to_plain(returned), "", num_samples=1) == {"prediction": [5]}


def test_what_has_no_row_per_sample_is_refused() -> None:
    for returned, what in (
        (torch.zeros(3, 4), "3 rows for 2 samples"),
        ({"loss": torch.tensor(1.0)}, "a float for 2 samples in loss"),
        ([torch.zeros(2)] * 3, "3 rows for 2 samples"),
    ):
        with pytest.raises(ValueError, match=rf"predict_step returned {what}\. "):
            columns_of(to_plain(returned), "", num_samples=2)


Written = Callable[..., list[list[str]]]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write batches, each what was returned with its indices and perhaps its loader; the rows."""

    def write(*batches: tuple[Any, ...], facts: Any = None) -> list[list[str]]:
        table = PredictionTable(tmp_path / "out.csv")
        for batch_idx, (returned, indices, *loader) in enumerate(batches):
            table.write_on_batch_end(None, None, returned, indices, None, batch_idx, *loader)
        loader = SimpleNamespace(dataset=SimpleNamespace(sample_columns=facts or {}))
        trainer = SimpleNamespace(world_size=1, is_global_zero=True, predict_dataloaders=loader)
        table.on_predict_epoch_end(trainer, None)
        text = table.path.read_text() if table.path.exists() else ""
        return list(csv.reader(text.splitlines()))

    return write


def test_rows_are_in_order_and_may_differ_in_their_columns(written: Written) -> None:
    batches = (torch.tensor([[2], [1]]), [2, 1]), (torch.tensor([[0, 0]]), [0])
    rows = written(*(({"p": values}, indices) for values, indices in batches))
    assert rows == [["sample", "p.0", "p.1"], ["0", "0", "0"], ["1", "1", ""], ["2", "2", ""]]


def test_indices_of_the_batch_before_are_not_taken_for_those_of_a_stream(written: Written) -> None:
    """Lightning passes the same list again for a loader whose indices it does not know."""
    known = [1, 0]
    rows = written((torch.tensor([1, 0]), known, 0), (torch.tensor([5, 6]), known, 1))
    assert rows == [
        ["loader", "sample", "prediction"],
        *(["0", "0", "0"], ["0", "1", "1"], ["1", "0", "5"], ["1", "1", "6"]),
    ]


def test_rows_of_a_stream_keep_the_order_of_batches_and_processes() -> None:
    first = [(0, 0, None, {"p": 0}), (0, 1, None, {"p": 2})]
    second = [(0, 0, None, {"p": 1}), (0, 1, None, {"p": 3})]
    assert number_rows(first + second) == {(0, i): {"p": i} for i in range(4)}


def test_columns_of_the_table_and_of_the_data_set_stand_beside_those_of_the_model(
    written: Written,
) -> None:
    assert written(({"sample": torch.tensor([5])}, [3])) == [
        ["sample", "prediction.sample"],
        ["3", "5"],
    ]
    facts = {"file": ["a", "b"]}
    for returned, rows in (
        ({"p": torch.tensor([5, 6])}, [["sample", "file", "p"], ["0", "a", "5"], ["1", "b", "6"]]),
        ({"file": ["x", "y"]}, [["sample", "file"], ["0", "x"], ["1", "y"]]),
    ):
        assert written((returned, [0, 1]), facts=facts) == rows


@pytest.mark.parametrize(
    ("shapes", "columns"),
    [
        ([(2, 3), (2, 5), (1, 4)], "prediction.3, prediction.4"),
        ([(2, 2, 2), (1, 3, 2)], "prediction.4, prediction.5"),
        ([(2, 3), (1, 3)], ""),
        ([(2,), (1,)], ""),
    ],
)
def test_padded_rows_of_several_widths_are_warned_of(
    shapes: list[tuple[int, ...]], columns: str, written: Written, caplog
) -> None:
    """Padding depends on the other samples of a batch."""
    written(*((torch.ones(shape), None) for shape in shapes))
    says = f"Batches have different columns ({columns}), perhaps because of padding."
    assert [message.startswith(says) for message in caplog.messages] == [True] * bool(columns)


def test_lists_of_several_lengths_are_cells(written: Written, caplog) -> None:
    rows = written(*((lists, None) for lists in ([[1, 2], [3]], [[4, 5, 6]])))
    assert rows[1:] == [["0", "[1, 2]"], ["1", "[3]"], ["2", "[4, 5, 6]"]]
    assert not caplog.messages


def test_mask_goes_beside_the_table_and_not_into_hundreds_of_columns(
    written: Written, tmp_path: Path, caplog
) -> None:
    batch = {"label": torch.tensor([5, 6]), "net": {"mask": torch.ones(2, 8, 8)}}
    assert written((batch, [1, 0])) == [["sample", "label"], ["0", "6"], ["1", "5"]]
    (saved,) = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (saved["samples"], [*saved["prediction"]]) == ([1, 0], ["net.mask"])
    assert saved["prediction"]["net.mask"].shape == (2, 8, 8)
    assert "net.mask has 64 numbers per sample" in caplog.text


def test_what_is_no_table_is_kept_as_plain_values(written: Written, tmp_path: Path) -> None:
    left = Pair(torch.ones(3), {"z": 1j})
    ragged = {"x": left, 1: {Path("a")}, "n": np.ones(2), "s": torch.eye(2).to_sparse()}
    assert written((ragged, [0, 1])) == []
    (saved,) = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved["samples"] == [0, 1]
    assert saved["prediction"]["x"]["left"].tolist() == [1, 1, 1]
    assert "PosixPath" in saved["prediction"][1]


class Writer(pl.callbacks.BasePredictionWriter):
    """A user's own writer."""

    def write_on_batch_end(self, *arguments: Any) -> None:
        assert type(arguments[3]) is list
        self.found = [*getattr(self, "found", []), arguments[3]]

    def write_on_epoch_end(self, trainer: Any, module: Any, outputs: Any, indices: Any) -> None:
        assert indices == [self.found] == [[[0, 1], [2, 3], [4]]]
        assert {type(batch) for batch in indices[0]} == {list}


class Predicts(pl.LightningModule):
    def predict_step(self, batch: Any) -> Any:
        return batch

    def predict_dataloader(self) -> Any:
        return DataLoader(torch.arange(5), batch_size=2)


def predict() -> None:
    small_trainer(1, Writer(write_interval="batch_and_epoch")).predict(Predicts())


def test_a_writer_gets_indices_as_plain_lists() -> None:
    """And no ``Batch``, which seeds the generators of whatever iterates over it."""
    in_processes(1, predict)
