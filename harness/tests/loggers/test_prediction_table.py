import csv
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from harness.loggers.prediction_table import PredictionTable, columns_of, numbered, plain


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
        assert columns_of(plain(returned), "", num_samples=2) == columns
    for returned in (torch.tensor(5), 5, np.float32(5)):  # the row of a single sample
        assert columns_of(plain(returned), "", num_samples=1) == {"prediction": [5]}


def test_what_has_no_row_per_sample_is_refused() -> None:
    for returned, message in (
        (torch.zeros(3, 4), "returned 3 rows for 2 samples. "),
        ({"loss": torch.tensor(1.0)}, "returned a float for 2 samples in loss. "),
        (None, "returned a NoneType for 2 samples. "),
        ([torch.zeros(2)] * 3, "returned 3 rows for 2 samples. "),
    ):
        with pytest.raises(ValueError, match="predict_step") as error:
            columns_of(plain(returned), "", num_samples=2)
        assert message in str(error.value)


def finished(table: PredictionTable) -> list[list[str]]:
    table.on_predict_epoch_end(SimpleNamespace(world_size=1, is_global_zero=True), None)
    with table.path.open() as file:
        return list(csv.reader(file))


def test_rows_are_in_order_and_may_differ_in_their_columns(tmp_path: Path) -> None:
    table = PredictionTable(tmp_path / "predictions.csv")
    for indices, width in (([2, 1], 1), ([0], 2)):
        values = torch.tensor(indices).unsqueeze(1).expand(-1, width)
        table.write_on_batch_end(None, None, {"p": values}, indices)
    assert finished(table) == [
        ["sample", "p.0", "p.1"],
        ["0", "0", "0"],
        ["1", "1", ""],
        ["2", "2", ""],
    ]


def test_indices_of_the_batch_before_are_not_taken_for_those_of_a_stream(tmp_path: Path) -> None:
    """Lightning passes the same list again for a loader whose indices it does not know."""
    table, known = PredictionTable(tmp_path / "predictions.csv"), [1, 0]
    table.write_on_batch_end(None, None, torch.tensor([1, 0]), known)
    table.write_on_batch_end(None, None, torch.tensor([5, 6]), known, dataloader_idx=1)
    rows = finished(table)
    assert rows == [
        ["loader", "sample", "prediction"],
        *(["0", "0", "0"], ["0", "1", "1"], ["1", "0", "5"], ["1", "1", "6"]),
    ]


def test_rows_of_a_stream_keep_the_order_of_batches_and_processes() -> None:
    first = [(0, 0, None, {"p": 0}), (0, 1, None, {"p": 2})]
    second = [(0, 0, None, {"p": 1}), (0, 1, None, {"p": 3})]
    assert numbered(first + second) == {(0, i): {"p": i} for i in range(4)}


def test_columns_of_the_table_itself_are_not_replaced(tmp_path: Path) -> None:
    table = PredictionTable(tmp_path / "predictions.csv")
    table.write_on_batch_end(None, None, {"sample": torch.tensor([5])}, [3])
    assert finished(table) == [["sample", "prediction.sample"], ["3", "5"]]


def test_padded_rows_of_several_widths_are_warned_of_and_lists_are_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding depends on the other samples of a batch; a sample's own list does not."""
    for shapes, says in (
        (
            [(2, 3), (2, 5), (1, 4)],
            "Batches have different columns (prediction.3, prediction.4): padding",
        ),
        (
            [(2, 2, 2), (1, 3, 2)],
            "Batches have different columns (prediction.4, prediction.5): padding",
        ),
        ([(2, 3), (1, 3)], ""),
        ([(2,), (1,)], ""),
    ):
        table = PredictionTable(tmp_path / "padded.csv")
        for batch_idx, shape in enumerate(shapes):
            table.write_on_batch_end(None, None, torch.ones(shape), None, batch_idx=batch_idx)
        finished(table)
        assert len(caplog.messages) == bool(says)
        assert "".join(caplog.messages).startswith(says)
        caplog.clear()
    table = PredictionTable(tmp_path / "lists.csv")
    for batch_idx, lists in enumerate(([[1, 2], [3]], [[4, 5, 6]])):
        table.write_on_batch_end(None, None, lists, None, batch_idx=batch_idx)
    assert finished(table)[1:] == [["0", "[1, 2]"], ["1", "[3]"], ["2", "[4, 5, 6]"]]
    assert not caplog.messages


def test_mask_goes_beside_the_table_and_not_into_hundreds_of_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = PredictionTable(tmp_path / "out.csv")
    batch = {"label": torch.tensor([5, 6]), "net": {"mask": torch.ones(2, 8, 8)}}
    table.write_on_batch_end(None, None, batch, [1, 0])
    assert finished(table) == [["sample", "label"], ["0", "6"], ["1", "5"]]
    (saved,) = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (saved["samples"], [*saved["prediction"]]) == ([1, 0], ["net.mask"])
    assert saved["prediction"]["net.mask"].shape == (2, 8, 8)
    assert "net.mask has 64 numbers a sample" in caplog.text


def test_what_is_no_table_is_kept_as_plain_values(tmp_path: Path) -> None:
    table = PredictionTable(tmp_path / "out.csv")
    ragged = {
        "x": Pair(torch.ones(3), {"z": 1j}),
        1: {Path("a")},
        "n": np.ones(2),
        "s": torch.eye(2).to_sparse(),
    }
    table.write_on_batch_end(None, None, ragged, [0, 1])
    table.on_predict_epoch_end(SimpleNamespace(world_size=1, is_global_zero=True), None)
    assert not table.path.exists()
    (saved,) = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved["samples"] == [0, 1]
    assert saved["prediction"]["x"]["left"].tolist() == [1, 1, 1]
    assert "PosixPath" in saved["prediction"][1]


def test_what_samples_are_stands_in_columns_unless_the_model_has_one(tmp_path: Path) -> None:
    for returned, rows in (
        ({"p": torch.tensor([5, 6])}, [["sample", "file", "p"], ["0", "a", "5"], ["1", "b", "6"]]),
        ({"file": ["x", "y"]}, [["sample", "file"], ["0", "x"], ["1", "y"]]),
    ):
        table = PredictionTable(tmp_path / "predictions.csv")
        table.write_on_batch_end(None, None, returned, [0, 1])
        loader = SimpleNamespace(dataset=SimpleNamespace(sample_columns={"file": ["a", "b"]}))
        trainer = SimpleNamespace(world_size=1, is_global_zero=True, predict_dataloaders=loader)
        table.on_predict_epoch_end(trainer, None)
        with table.path.open() as file:
            assert list(csv.reader(file)) == rows
