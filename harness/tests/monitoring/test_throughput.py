"""Known answers, by a clock that the tests move: on a busy machine, what sleeps is late."""

import os
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from harness.data.batches import BatchedDataset
from harness.data.datamodule import DataModule
from harness.monitoring import throughput
from harness.monitoring.throughput import Throughput
from harness.monitoring.verdict import Setup, Spent, verdict
from tests.modules.classifiers import OneLoss
from tests.workers.trainer import small_trainer


class SlowDataset(BatchedDataset):
    """Calls ``work`` for each batch."""

    def __init__(self, work: Any, num_samples: int) -> None:
        self.work, self.num_samples = work, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitems__(self, indices: list[int]) -> Tensor:
        self.work()
        return torch.ones(len(indices), 4)


class SlowData(DataModule):
    def __init__(self, work: Any) -> None:
        super().__init__(batch_size=4)
        self.work = work

    def make_dataset(self, split: str) -> SlowDataset:
        # Validation reads slowly as well, and is none of a training step's time.
        return SlowDataset(self.work, 30 if split == "train" else 4)


class SlowModule(OneLoss):
    """Calls ``copy`` when a batch is moved and ``compute`` in a step."""

    def __init__(self, compute: Any, copy: Any = lambda: None) -> None:
        super().__init__()
        self.net, self.compute, self.copy = nn.Linear(4, 1), compute, copy

    def transfer_batch_to_device(self, batch: Tensor, device: Any, dataloader_idx: int) -> Tensor:
        self.copy()
        return batch.to(device)

    def loss(self, batch: Tensor) -> Tensor:
        self.compute()
        return self.net(batch).mean()


def fit(data: DataModule, module: SlowModule, *others: pl.Callback, **kwargs: Any) -> Throughput:
    callback = Throughput()
    small_trainer(1, callback, *others, **{"max_epochs": 2} | kwargs).fit(module, data)
    return callback


quiet = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*treespec:FutureWarning")


class Hand:
    """A clock that a test moves."""

    now = 0.0

    def by(self, seconds: float) -> Any:
        def move() -> None:
            self.now += seconds

        return move


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    """The clock of every run of a test."""
    hand = Hand()
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: hand.now))
    return hand


@quiet
def test_run_says_whether_its_data_or_its_network_is_slow(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Spent(data=1, seconds=100, num_steps=3, num_samples=12)  # of a process that waits less
    monkeypatch.setattr(throughput, "gather", lambda trainer, mine: [(other, mine[1]), mine])
    found = fit(SlowData(hand.by(3.0)), SlowModule(hand.by(1.0)))
    assert found.total.data / found.total.seconds == 0.75
    assert found.verdict.startswith("input-bound: ")
    monkeypatch.setattr(throughput, "gather", lambda trainer, mine: [mine])
    found = fit(SlowData(lambda: None), SlowModule(hand.by(3.0)))
    assert found.total.data == 0.0
    assert found.verdict.startswith("device-bound: ")


class Late(pl.Callback):
    """Takes time after each step, and before each."""

    def __init__(self, hand: Hand) -> None:
        self.after, self.before = hand.by(7.0), hand.by(0.5)

    def on_train_batch_start(self, *_: Any) -> None:
        self.before()

    def on_train_batch_end(self, *_: Any) -> None:
        self.after()


@quiet
def test_every_second_is_counted_once_and_where_it_was_spent(hand: Hand) -> None:
    """15 steps of two epochs without the first; validation, at 3 + 5 + 1 s a batch, is left out.

    The last step of an epoch has none after it, nor have those before a validation.
    """
    module = SlowModule(hand.by(5.0), copy=hand.by(1.0))
    found = fit(SlowData(hand.by(3.0)), module, Late(hand), val_check_interval=3).total
    assert found.num_steps == 2 * 8 - 1
    assert found.num_samples == 2 * 30 - 4
    assert found.data == 15 * 3.0
    assert found.seconds == 15 * (3.0 + 1.0 + 5.5) + 7.0 * 15 - 7.0 * (1 + 4)


def test_advice_is_what_the_rest_of_the_step_needs_and_the_cores_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If other programs keep the cores busy, more workers would not help."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    for data, workers, cores, expected in (
        (0.03, 0, 8, "try data.num_workers=3 (now 0)"),  # 30 ms to load while 10 ms are computed
        (0.03, 2, 16, "try data.num_workers=8 (now 2)"),  # two load one batch in 20 ms: 80 ms each
        (0.03, 2, 2, "read whole batches"),
        (0.005, 0, 8, "try data.num_workers=1 (now 0)"),
    ):
        spent = Spent(data=100 * data, seconds=100 * (data + 0.01), num_steps=100, num_samples=400)
        assert expected in verdict(spent, Setup(workers, cores))
    words = "input-bound: 63% of the time waiting for data; try data.num_workers=2 (now 0)"
    assert verdict(Spent(data=63, seconds=100, num_steps=10), Setup(0, 4)) == words
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    waits_little = Spent(data=5, seconds=100, num_steps=10)
    assert "cores have a load of 999.0" in verdict(waits_little, Setup())


def test_the_verdict_names_what_limits_the_run_and_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    slow = Spent(data=5, seconds=100, num_steps=10)
    text = "device-bound: 5% of the time waiting for data; try "
    assert verdict(slow, Setup()) == f"{text}compile=true"
    assert verdict(slow, Setup(is_compiled=True)) == f"{text}a GPU"
    compiled = Setup(is_compiled=True, is_on_gpu=True)
    assert verdict(slow, compiled) == f"{text}more GPUs (trainer.devices)"
    single = Setup(faster_precision="bf16-mixed", is_on_gpu=True)
    assert verdict(slow, single) == f"{text}trainer.precision=bf16-mixed or compile=true"
    # Half a millisecond for a batch: more workers give it no faster.
    text = "host-bound: 33% of a step of 1.5 ms is spent on fetching the next batch; try a larger "
    fast = Spent(data=0.05, seconds=0.15, num_steps=100)
    assert verdict(fast, Setup(0, 4)) == f"{text}data.batch_size or compile=true"
    most = Spent(data=0.09, seconds=0.1, num_steps=100)
    assert verdict(most, Setup(0, 4)).endswith(
        "; read whole batches (BatchedDataset) or make the transforms cheaper"
    )


def test_a_gpu_that_python_keeps_waiting_is_host_bound_unless_it_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that waits for the device empties its queue, and the device is busy all the same."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    text = "host-bound: Python is slower than the GPU in 97% of the steps; try a larger "
    for num_drained, busy, expected in (
        (97, None, f"{text}data.batch_size"),
        (97, 0.4, f"{text}data.batch_size"),
        (97, 0.95, "device-bound: 5% of the time waiting for data; try more GPUs"),
        (40, 0.4, "device-bound: 5% of the time waiting for data; try more GPUs"),
    ):
        spent = Spent(data=5, seconds=100, num_steps=100, num_drained=num_drained)
        setup = Setup(is_compiled=True, is_on_gpu=True, gpu_busy=busy)
        assert verdict(spent, setup).startswith(expected)


@quiet
@pytest.mark.parametrize("is_passed", [True, False])
def test_each_step_asks_once_whether_the_device_has_work_left(
    is_passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr(throughput, "has_passed", lambda mark: asked.append(mark) or is_passed)
    found = fit(SlowData(lambda: None), SlowModule(lambda: None)).total
    assert found.num_drained == (found.num_steps if is_passed else 0)
    assert len(asked) == found.num_steps
    assert None not in asked


class Compiling(SlowModule):
    """Compiles for each size of a batch, and from the fourth step on a second function."""

    def __init__(self, hand: "Hand") -> None:
        super().__init__(hand.by(1.0))
        self.num_steps = 0

        def compiler(graph: Any, _: Any) -> Any:
            hand.by(100.0)()
            return graph.forward

        self.first = torch.compile(lambda x: x + 0, backend=compiler, dynamic=False)
        self.second = torch.compile(lambda x: x * 1, backend=compiler, dynamic=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return self.loss((self.first if self.num_steps < 4 else self.second)(batch))


@quiet
def test_steps_in_which_something_is_compiled_do_not_count(hand: Hand) -> None:
    """Steps 1 and 4, and the last batch of the first epoch, which is smaller, are left out."""
    found = fit(SlowData(lambda: None), Compiling(hand))
    assert found.num_compiled == 3
    assert found.total.num_steps == 16 - 3
    assert found.total.seconds == 13 * 1.0
    assert "compile=true" not in str(found.verdict)


def burn(milliseconds: float) -> Any:
    """Give the GPU work of about this length, and return at once."""
    return lambda: torch.cuda._sleep(int(milliseconds * 1_500_000))


@quiet
@pytest.mark.gpu
def test_gpu_that_has_work_does_not_wait_for_data() -> None:
    """The host reads for 10 ms per step, while the device still has 30 ms to do."""
    found = fit(
        SlowData(partial(time.sleep, 0.01)), SlowModule(burn(30)), accelerator="gpu", max_epochs=4
    )
    assert found.total.data < 0.1 * found.total.seconds
    assert found.verdict.startswith("device-bound")


@quiet
@pytest.mark.gpu
def test_gpu_that_has_run_out_of_work_waits_for_data() -> None:
    found = fit(
        SlowData(partial(time.sleep, 0.03)), SlowModule(burn(10)), accelerator="gpu", max_epochs=4
    )
    assert found.total.data > 0.4 * found.total.seconds
    assert found.verdict.startswith("input-bound")


@quiet
@pytest.mark.gpu
def test_gpu_whose_steps_are_shorter_than_pythons_is_host_bound() -> None:
    found = fit(SlowData(lambda: None), SlowModule(partial(time.sleep, 0.005)), accelerator="gpu")
    assert found.total.num_drained > 0.9 * found.total.num_steps
    assert found.verdict.startswith("host-bound")
