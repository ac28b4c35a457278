import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from harness.data import measuring
from harness.data.batches import BatchedDataset
from harness.data.datamodule import DataModule
from harness.data.measuring import best, measure, seconds_per_batch
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


def measured(*milliseconds: float) -> dict[int, float]:
    """Seconds per batch with 0, 1, 2, 4, … workers."""
    numbers = (0, 1, 2, 4, 8)[: len(milliseconds)]
    return {n: each / 1000 for n, each in zip(numbers, milliseconds, strict=True)}


def test_the_best_is_the_least_number_that_is_as_fast_as_any() -> None:
    assert best(measured(40, 40, 20, 10, 10)) == 4
    assert best(measured(40, 40, 20, 19, 25)) == 2  # 4 are hardly faster, 8 are slower
    assert best(measured(40, 42)) == 1  # no faster, but beside the step and not in it
    assert best(measured(0.3, 0.5, 0.4)) == 0
    assert best(measured(4, 10, 8)) == 0  # large batches cost much to take over
    assert best(measured(0.2)) == 0


@pytest.mark.parametrize("receiving_seconds", [0.0, 1.0])
def test_no_more_workers_are_started_than_help(monkeypatch, receiving_seconds: float) -> None:
    """And none for a data set that is fast: fewer than 1 ms, even on busy cores."""
    monkeypatch.setattr(measuring, "RECEIVING_SECONDS", receiving_seconds)
    speeds = iter([0.04, 0.04, 0.02, 0.019])
    monkeypatch.setattr(measuring, "seconds_per_batch", lambda _: next(speeds))
    found = measure(lambda n: Data(0.0).endless_loader(n, "train"), [0, 1, 2, 4, 8, 16])
    assert list(found) == ([0] if receiving_seconds else [0, 1, 2, 4])


def test_measuring_leaves_the_generators_as_they_were(monkeypatch) -> None:
    monkeypatch.setattr(measuring, "SECONDS_EACH", 0.1)

    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    for num_workers in (0, 1):
        seconds_per_batch(Data(0.0).endless_loader(num_workers, "train"))
    assert draw() == expected


def test_auto_chooses_by_measuring_and_says_so(monkeypatch, capsys) -> None:
    found = measured(40, 40, 20)
    monkeypatch.setattr("harness.data.datamodule.measure", lambda *_: found)
    assert Data(100.0).choose_workers("val", num_ranks=1, num_nodes=1) == 2
    said = "data.num_workers=auto chose 2 (batches per second with 0: 25, 1: 25, 2: 50)"
    assert said in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_choose_once(tmp_path) -> None:
    result = command(
        "train.py", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "model=mlp",
        "data.num_workers=auto", "trainer.max_epochs=1", f"output_dir={tmp_path}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("data.num_workers=auto chose") == 1
