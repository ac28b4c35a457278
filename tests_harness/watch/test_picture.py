"""A picture shows every sample once, and never costs a run its result."""

import logging
import os
import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

from harness.loggers.tensorboard import TensorBoard
from harness.watch.picture import Picture
from tests_harness.conftest import ROOT, command

pytestmark = [
    # Lightning 2.6 walks batches with names that torch 2.13 calls old.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),
    pytest.mark.filterwarnings("ignore:The 'test_dataloader' does not have many workers"),
    # On a machine with Slurm installed.
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def test_step(self, batch, batch_idx):
        self.log("test/sum", batch.sum())
        return {"rows": batch}


class Sums(Picture):
    """Keeps the sum of each batch; ``fault`` names the method that fails."""

    name = "test/sums"

    def __init__(self, fault=None):
        self.fault, self.drawn = fault, None

    def fail(self, method):
        if self.fault == method:
            raise RuntimeError(f"{method} cannot")

    def reset(self):
        self.fail("reset")
        self.sums = []

    def update(self, outputs, batch):
        self.fail("update")
        assert torch.equal(outputs["rows"], batch)
        self.sums.append(batch.sum().item())

    def kept(self):
        self.fail("kept")
        return self.sums if self.fault != "pickle" else lambda: None

    def draw(self, parts):
        self.fail("draw")
        self.drawn = parts
        return Figure()


def run(picture, folder: Path | None):
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[picture],
        logger=TensorBoard(folder) if folder else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(torch.arange(6.0).unsqueeze(1), batch_size=2)
    return trainer.test(Module(), loader, verbose=False)[0]["test/sum"]


def test_a_picture_that_fails_costs_no_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a fault it is drawn of every batch, also in the test after one that has failed."""
    for fault in ("reset", "update", "kept", "pickle", "draw"):
        caplog.clear()
        picture = Sums(fault)
        with caplog.at_level(logging.INFO, logger="harness.watch.picture"):
            assert run(picture, tmp_path) == 5
        assert picture.drawn is None
        (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
        assert warning.getMessage().startswith("Sums is not drawn: "), fault
        assert warning.exc_info is None
        assert sum(r.exc_info is not None for r in caplog.records) == 1  # for the log file
        picture.fault = None
        run(picture, tmp_path)
        assert picture.drawn == [[1, 5, 9]]


def test_nothing_is_computed_without_a_logger() -> None:
    picture = Sums("update")
    run(picture, None)
    assert picture.error is None


PROGRAM = """
import sys
import torch
from torch.utils.data import BatchSampler, DataLoader
import pytorch_lightning as pl
from tests_harness.watch.test_picture import Module, Sums
from harness.data.shared_batches import SharedBatchSampler
from harness.exact.evaluation import ExactEvaluation
from harness.loggers.tensorboard import TensorBoard

class OnSecond(Sums):
    def fail(self, method):
        if torch.distributed.get_rank() == 1:
            super().fail(method)

class Data(pl.LightningDataModule):
    def __init__(self, num_samples):
        super().__init__()
        self.num_samples = num_samples

    def test_dataloader(self):
        rank = self.trainer.global_rank
        batches = BatchSampler(range(self.num_samples), 2, drop_last=False)
        shared = SharedBatchSampler(batches, "x", num_ranks=2, rank=rank, in_turn=True)
        return DataLoader(torch.arange(float(self.num_samples)).unsqueeze(1), batch_sampler=shared)

for fault, num_samples in (("none", 4), ("none", 1), ("update", 4), ("pickle", 4)):
    picture = OnSecond(fault)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", callbacks=[ExactEvaluation(), picture],
        logger=TensorBoard(sys.argv[1]), use_distributed_sampler=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )
    trainer.test(Module(), Data(num_samples), verbose=False)
    if trainer.is_global_zero:
        print("drawn", fault, num_samples, picture.drawn)
"""


def test_processes_agree_on_what_is_drawn(tmp_path: Path) -> None:
    """One that fails lets none of the others wait; a sample that keeps one busy is none."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = command("-W", "ignore", script, tmp_path / "logs", environment={"PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    assert re.findall("drawn (.*)", result.stdout) == [
        "none 4 [[1.0], [5.0]]",
        "none 1 [[0.0], []]",
        "update 4 None",
        "pickle 4 None",
    ]
    assert result.stderr.count("is not drawn: ") == 2
