import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from harness.data import datamodule
from harness.data.batches import BatchedDataset
from harness.data.datamodule import DataModule, best
from harness.data.randomness import generator_states, same_states
from tests.faults.fork_server import command


class Sleeps(BatchedDataset):
    """Reads a batch in ``seconds``, and draws from the generators."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.randn(len(indices)) + random.random() + np.random.rand()


class Data(DataModule):
    def __init__(self, seconds: float, **kwargs: Any) -> None:
        super().__init__(batch_size=4, **kwargs)
        self.seconds = seconds

    def make_dataset(self, split: str) -> Sleeps:
        return Sleeps(self.seconds)


@pytest.mark.parametrize(
    ("milliseconds", "number"),
    [
        ((40, 40, 20, 10, 10), 4),
        ((40, 40, 20, 19, 25), 2),  # 4 are hardly faster, 8 are slower
        ((40, 42), 1),  # no faster, but beside the step and not in it
        ((0.3, 0.5, 0.4), 0),
        ((4, 10, 8), 0),  # large batches cost much to take over
    ],
)
def test_the_best_is_the_least_number_that_is_as_fast_as_any(milliseconds, number) -> None:
    numbers = (0, 1, 2, 4, 8)
    assert best({n: ms / 1000 for n, ms in zip(numbers, milliseconds, strict=False)}) == number


@pytest.mark.parametrize("receiving_seconds", [0.0, 1.0])
def test_no_more_workers_are_started_than_help(
    monkeypatch, capsys, receiving_seconds: float
) -> None:
    """And none for a data set that is fast: fewer than 1 ms, even on busy cores."""
    speeds = iter([0.04, 0.04, 0.02, 0.019])
    monkeypatch.setattr(datamodule, "RECEIVING_SECONDS", receiving_seconds)
    monkeypatch.setattr(datamodule, "usable_cores", lambda: 16)
    monkeypatch.setattr(DataModule, "seconds_per_batch", lambda *_: next(speeds))
    chosen = Data(0.0).choose_workers("train", num_ranks=1, num_nodes=1)
    assert chosen == (0 if receiving_seconds else 2)
    assert len([*speeds]) == (3 if receiving_seconds else 0)
    said = capsys.readouterr().out
    assert f"data.num_workers=auto chose {chosen} (batches per second with 0: 25" in said


def test_measuring_leaves_the_generators_as_they_were(monkeypatch) -> None:
    monkeypatch.setattr(datamodule, "MEASURED_SECONDS", 0.1)

    before = generator_states()
    for num_workers in (0, 1):
        assert Data(0.001).seconds_per_batch("train", num_workers) > 0
    assert same_states(generator_states(), before)


@pytest.mark.slow
def test_two_processes_choose_once(tmp_path) -> None:
    result = command(
        "train.py", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "model=mlp",
        "data.num_workers=auto", "trainer.max_epochs=1", f"output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("data.num_workers=auto chose") == 1
