"""A picture shows every sample once, and never costs a run its result."""

import logging
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

from harness.loggers.tensorboard import TensorBoard
from harness.watch.picture import Picture
from tests.faults.fork_server import command
from tests.strategies.parity import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


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


class OnSecond(Sums):
    """Counts samples; only the second process fails. What is drawn goes to a file."""

    def __init__(self, fault: str, folder: str) -> None:
        super().__init__(fault)
        self.path = Path(folder, fault)

    @property
    def state_key(self) -> str:
        return f"on second {self.fault}"

    def fail(self, method):
        if torch.distributed.get_rank() == 1:
            super().fail(method)

    def update(self, outputs, batch):
        self.fail("update")
        self.sums.append(len(batch[0]))

    def kept(self):
        is_bad = self.fault == "pickle" and torch.distributed.get_rank() == 1
        return (lambda: None) if is_bad else self.sums

    def draw(self, parts):
        self.path.write_text(repr(parts))
        return Figure()


def test_processes_agree_on_what_is_drawn(tmp_path: Path) -> None:
    """One that fails lets none of the others wait; a sample that keeps one busy is none."""
    faults = ("none", "update", "pickle")
    place = f"{__name__}.OnSecond"
    result = command(
        *("train.py", "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"),
        *("data=synthetic", "model=mlp", "data.num_train=64", "trainer.max_epochs=1"),
        *("data.num_test=9", "data.batch_size=4", "trainer.enable_progress_bar=false"),
        *(f"+callbacks.{fault}._target_={place}" for fault in faults),
        *(f"+callbacks.{fault}.fault={fault}" for fault in faults),
        *(f"+callbacks.{fault}.folder={tmp_path}" for fault in faults),
        f"output_dir={tmp_path}/runs",
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"none", "runs"}
    assert (tmp_path / "none").read_text() == "[[4, 1], [4]]"
    assert result.stderr.count("OnSecond is not drawn: ") == 2
