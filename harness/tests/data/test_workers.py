import random
import time
from typing import Any

import numpy as np
import pytest
import torch

from harness.data import measuring as workers
from harness.data.batches import BatchedDataset
from harness.data.datamodule import DataModule
from harness.data.measuring import Measured, knee, measure, measure_briefly
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


def measured(alone: float, *helped: float, receiving: float = 0.2) -> list[Measured]:
    """From milliseconds per batch, with 0, 1, 2, 4, … workers."""
    numbers = [2**k for k in range(len(helped))]
    found = [
        Measured(n, ms / 1000, receiving / 1000) for n, ms in zip(numbers, helped, strict=True)
    ]
    return [Measured(0, alone / 1000, alone / 1000), *found]


def test_knee_is_the_least_number_that_is_as_good_as_any() -> None:
    assert knee(measured(40, 40, 20, 10, 10)) == 4
    assert knee(measured(40, 40, 20, 19, 25)) == 2  # 4 are hardly faster, 8 are slower
    assert knee(measured(40, 42)) == 1  # no faster, but beside the step and not in it
    assert knee(measured(0.3, 0.5, 0.4)) == 0
    assert knee(measured(4, 10, 8, receiving=3)) == 0  # large batches cost much to take over
    assert knee(measured(0.2)) == 0


def test_data_set_that_is_fast_is_left_to_the_training_process(monkeypatch) -> None:
    """And no worker is started to find out."""
    monkeypatch.setattr(workers, "SECONDS_EACH", 0.05)
    monkeypatch.setattr(workers, "RECEIVING_SECONDS", 1.0)  # fast even on busy cores
    data = Data(0.0)
    found = measure_briefly(lambda n: data.endless_loader(n, "train"), [0, 1, 2])
    assert [m.num_workers for m in found] == [0]


def test_measuring_leaves_the_generators_as_they_were() -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    for num_workers in (0, 1):
        measure(Data(0.0).endless_loader(num_workers, "train"), 0.1)
    assert draw() == expected


def test_auto_chooses_by_measuring_and_says_so(monkeypatch, capsys) -> None:
    found = measured(40, 40, 20)
    monkeypatch.setattr("harness.data.datamodule.measure_briefly", lambda *_: found)
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
