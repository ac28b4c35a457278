"""``trainer.should_stop`` ends the training of all ranks at one step, whichever rank has set it."""

import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.checkpoints.safe_point import SafePoint
from harness.checkpoints.writing import DurableCheckpointIO
from harness.distributed.gather import gather
from harness.training.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer

STOP_AT = 7  # of 40 steps in each epoch


class Stops(pl.LightningModule):
    """Stops in one rank alone, in a hook that the test chooses."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.net, self.hook = nn.Linear(1, 1), hook

    def stop_in(self, hook: str) -> None:
        is_due = self.hook == hook and self.global_step >= STOP_AT
        if is_due and self.global_rank == self.trainer.world_size - 1:
            self.trainer.should_stop = True

    def training_step(self, batch: Tensor) -> Tensor:
        self.stop_in("training_step")
        loss = self.net(batch).mean()
        self.log("loss", loss)  # a rank alone would gather the row of the step that ends it
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val", batch.mean())

    def on_train_batch_end(self, *_: Any) -> None:
        self.stop_in("on_train_batch_end")

    def on_validation_end(self) -> None:
        self.stop_in("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self.stop_in("on_train_epoch_end")

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(160, 1), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int, hook: str, folder: Path, steps: range, accumulate: int, saves: bool) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(60)  # ranks that disagree wait for each other
    trainer = small_trainer(
        devices,
        SafePoint(folder, saves=saves),
        plugins=[DurableCheckpointIO(False)],
        accumulate_grad_batches=accumulate,
        max_epochs=4,
        log_every_n_steps=50,
        val_check_interval=2 if hook == "on_validation_end" else 1.0,
        num_sanity_val_steps=0,
    )
    trainer.fit(Stops(hook))
    reached = gather(trainer, (trainer.global_step, trainer.fit_loop.total_batch_idx + 1))
    assert len({*reached}) == 1, reached
    assert reached[0][0] in steps, reached
    assert reached[0][1] == reached[0][0] * accumulate
    assert (folder / "last.ckpt").exists() == saves
    close_process_group()


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("training_step", range(9, 30)),  # a vote is at most ten steps away, and its answer, too
        ("on_train_batch_end", range(9, 30)),
        ("on_validation_end", range(8, 9)),  # ranks meet there
        ("on_train_epoch_end", range(40, 41)),
    ],
)
def test_ranks_stop_at_one_step(hook: str, steps: range, tmp_path: Path) -> None:
    in_processes(2, fit, 2, hook, tmp_path, steps, 1, False)


@pytest.mark.parametrize("devices", [1, 2])
def test_the_step_ends_before_the_training(devices: int, tmp_path: Path) -> None:
    """Lightning alone stops between two batches that are accumulated; one rank stops at once."""
    steps = range(8, 9) if devices == 1 else range(9, 30)
    in_processes(devices, fit, devices, "training_step", tmp_path, steps, 2, True)
