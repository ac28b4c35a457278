"""Where memory runs out, a run says what may fit, and with that it fits."""

import re
from pathlib import Path

import pytest

from harness.run.out_of_memory import estimate
from harness.testing import command as typed
from tests_harness.strategy_runs import write_conf

# Each sample takes 8 MiB in a forward, and 4 more in its backward.
HUNGRY = """
import resource
import pytorch_lightning as pl
import torch
from torch import nn
from harness.data.datamodule import DataModule

class Data(DataModule):
    def __init__(self, num_samples, **settings):
        super().__init__(**settings)
        self.num_samples = num_samples

    def make_dataset(self, split):
        size = self.num_samples
        return torch.utils.data.TensorDataset(torch.rand(size, 64), torch.rand(size))

class Hungry(pl.LightningModule):
    def __init__(self, megabytes, is_manual=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 2**20), nn.Tanh(), nn.Linear(2**20, 1))
        self.megabytes, self.automatic_optimization = megabytes, not is_manual

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.megabytes:  # the optimizer has its state, and no more is needed
            pages = int(open("/proc/self/statm").read().split()[0])
            limit = pages * resource.getpagesize() + self.megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        if batch_idx == 0:
            inputs, targets = inputs[:1], targets[:1]
        loss = (self.net(inputs).squeeze(1) - targets).square().mean()
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)
"""
WORDS = (
    *("logger=none", "watch=none", "test=false"),
    *("trainer.max_epochs=1", "trainer.enable_progress_bar=false"),
)


@pytest.fixture
def train(tmp_path: Path):
    (tmp_path / "hungry.py").write_text(HUNGRY)
    words = write_conf(
        tmp_path,
        data="_target_: hungry.Data\nbatch_size: 32\nnum_samples: 64\n"
        "max_samples_per_device: null\n",
        model="_target_: hungry.Hungry\nmegabytes: 200\nis_manual: false\n",
    )

    def run(*more: str):
        often = () if "checkpoint=null" in more else ("checkpoint.every_n_steps=1",)
        return typed(
            *("train.py", *words, *WORDS, *often, f"output_dir={tmp_path}/runs", *more),
            environment={"PYTHONPATH": str(tmp_path), "MALLOC_ARENA_MAX": "1"},
        )

    return run


def test_a_run_without_memory_names_a_batch_that_fits_and_goes_on_with_it(train) -> None:
    failed = train()
    assert failed.returncode == 1
    told = failed.stderr[failed.stderr.index("hungry.py") :].strip().splitlines()
    assert len(told) == 5
    assert re.search(r"training_step: RuntimeError: out of memory, [\d.]+ MiB were asked", told[0])
    assert told[1].startswith("32 samples at once did not fit on a device. ")
    assert "net.0.weight (1048576, 64): 256.0 MiB, the gradient of net.0.weight" in told[3]
    assert "SGD's momentum_buffer of net.0.weight" in told[3]
    assert "input in forward (32, 1048576): 128.0 MiB" in told[3]
    (advised,) = re.findall(r"data.max_samples_per_device=\d+", failed.stderr)
    resumed = train(advised, "resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on from" in resumed.stdout


def test_who_optimizes_by_hand_is_told_a_batch_size(train) -> None:
    words = "model.is_manual=true", "checkpoint=null"  # which takes memory while it is written
    failed = train(*words)
    (size,) = map(int, re.findall(r"data.batch_size=(\d+)\.", failed.stderr))
    assert size <= 16
    again = train(*words, f"data.batch_size={size}")
    assert again.returncode == 0, again.stderr


def test_data_that_do_not_fit_are_no_matter_of_the_batch(train, tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(
        HUNGRY.replace(
            "        size = self", "        __import__('numpy').ones(10**13)\n        size = self"
        )
    )
    told = train().stderr
    assert re.search(
        r"make_dataset: \w*MemoryError: out of memory, [\d.]+ GiB were asked for", told
    )
    assert "a smaller batch does not help" in told
    assert "max_samples_per_device" not in told


def test_own_loaders_are_told_how_to_take_a_step_in_parts(train, tmp_path: Path) -> None:
    own = """
class Own(pl.LightningDataModule):
    def __init__(self, **settings):
        super().__init__()
        self.data = Data(**settings)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data.make_dataset("train"), batch_size=32)
"""
    (tmp_path / "hungry.py").write_text(HUNGRY + own)
    failed = train("data._target_=hungry.Own")
    assert failed.returncode == 1
    assert (
        "\ntrainer.accumulate_grad_batches=2 takes the same steps in smaller parts."
        in failed.stderr
    )


@pytest.mark.parametrize(
    ("tried", "asked", "free", "used", "expected"),
    [
        (32, 1.0, 0.9, 3.0, 8),  # of almost 32 there are powers of two below 16
        (32, 1.0, 1.0, 3.0, 16),
        (32, 100.0, 1.0, 3.0, 1),
        (64, 8.0, 0.0, 8.0, 16),
        (64, 8.0, 4.0, 0.0, 8),  # the first large tensor, and others to come
        (64, 0.0, 0.0, 0.0, 32),  # nothing is known
        (2, 1.0, 5.0, 1.0, 1),
    ],
)
def test_estimate_is_below_what_there_is_room_for(
    tried: int, asked: float, free: float, used: float, expected: int
) -> None:
    assert estimate(tried, asked, free, used) == expected


@pytest.mark.gpu
def test_a_gpu_without_memory_names_a_batch_that_fits(train) -> None:
    """Of 4 MiB a sample; the limit of the process does not hold for a GPU."""
    words = ("model.megabytes=0", "data.num_samples=1000000", "data.batch_size=1000000")
    failed = train(*words)
    assert failed.returncode == 1
    assert "OutOfMemoryError: out of memory" in failed.stderr
    (advised,) = re.findall(r"data.max_samples_per_device=\d+", failed.stderr)
    assert train(*words, advised, "trainer.max_steps=1").returncode == 0
