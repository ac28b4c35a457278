"""Stop a run at a value that is not finite, before a checkpoint can hold it."""

import logging
import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from harness.checkpoints import lookup
from harness.checkpoints.writing import DurableCheckpointIO
from harness.errors import TrainingError
from harness.kinds import sum_dtype
from harness.sharded import full_tensor

log = logging.getLogger(__name__)
STEPS_BETWEEN = 20  # a copy from a GPU at each step would slow small steps down
HOST = "cpu"  # the device whose values are read without synchronising


class NonFinite(pl.Callback):
    """Stop the run at a loss, gradient, weight or first objective that is not finite, and name it.

    Each loss is checked before its backward pass. On a GPU, the device stores the number of the
    first bad step, and copies it to the host every ``STEPS_BETWEEN`` steps. The host reads the copy
    ``STEPS_BETWEEN`` steps later, so that no step synchronises; only a checkpoint does.

    A gradient that is not finite spoils its weight in the same step, and then the next loss. Any
    weights that no loss depends on are checked before each checkpoint. The gradient scaler of
    ``16-mixed`` handles gradients that overflow.

    Args:
        folder: the folder of the run's checkpoints; the message names the newest checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.warned: set[str] = set()  # names of monitored values
        self.was_finite: set[str] = set()  # names of monitored values that were finite once
        self.on_train_start()

    def on_train_start(self, *_: Any) -> None:
        """Reset the first bad step; infinity means that there was none."""
        self.first_bad_step = torch.tensor(math.inf)
        self.copied = torch.tensor(math.inf)  # an earlier value of first_bad_step, on the host

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Check the loss on the CPU; on a GPU, let the device store a bad step."""
        if loss.dtype == torch.float16 and getattr(trainer.precision_plugin, "scaler", None):
            return  # a loss that the gradient scaler has multiplied may overflow in float16
        step = trainer.global_step
        if loss.device.type != HOST:
            bad_step = torch.where(loss.detach().isfinite(), math.inf, float(step))
            before = self.first_bad_step.to(loss.device, non_blocking=True)
            self.first_bad_step = torch.minimum(before, bad_step)
            if step % STEPS_BETWEEN == 0:
                self._check_losses(trainer, self.copied)
                if loss.is_cuda and not self.copied.is_pinned():
                    self.copied = self.copied.pin_memory()
                self.copied.copy_(self.first_bad_step, non_blocking=True)
        elif not math.isfinite(value := loss.item()):
            if weight := first_bad_weight(pl_module):
                if step == 0:
                    self._stop(trainer, 0, f"{weight} is not finite when training begins")
                # The previous step has made the weight not finite.
                self._stop(trainer, step - 1, f"the gradient of {weight} was not finite")
            self._stop(trainer, step, f"the loss is {value}, and every weight is finite")

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the values that have been finite at least once."""
        return {"was_finite": sorted(self.was_finite)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the names of the values that have been finite."""
        self.was_finite = {*state_dict["was_finite"]}

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Raise an error if the first value of an objective is not finite; warn of later ones."""
        if stage == "train_step" or trainer.state.fn != "fit":
            return
        present = monitored(trainer) & values.keys()
        not_finite = {name for name in present if not math.isfinite(values[name])}
        self.was_finite |= present - not_finite
        for name in sorted(not_finite - self.warned):
            self.warned.add(name)
            finding = f"{name} is {values[name]} in epoch {epoch}"
            if checkpoints_by(trainer, name) and name not in self.was_finite:
                message = (
                    f"{finding}, the first evaluation: no checkpoint could be the best.\nCheck "
                    f"the code that logs {name}, or choose another objective=<name>. To train on "
                    "regardless, type callbacks.non_finite=null."
                )
                if trainer.is_global_zero:
                    log.error(message)
                raise TrainingError(message)
            if trainer.is_global_zero:
                text = consequences(trainer, name, values[name])
                log.warning("%s. %sThis warning is not repeated.", finding, text)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep weights that are not finite out of every checkpoint."""
        self._check_losses(trainer, self.first_bad_step)  # synchronises
        if weight := first_bad_weight(pl_module):
            self._stop(trainer, trainer.global_step, f"{weight} is not finite, and was not saved")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the last losses, and the weights after the last step."""
        self.on_save_checkpoint(trainer, pl_module, {})

    def _check_losses(self, trainer: pl.Trainer, first_bad_step: Tensor) -> None:
        if (step := first_bad_step.item()) < math.inf:
            finding = "the loss is not finite; +trainer.detect_anomaly=true names the operation"
            self._stop(trainer, int(step), finding)

    def _stop(self, trainer: pl.Trainer, step: int, finding: str) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, DurableCheckpointIO):
            io.finish()  # a thread may still be writing the last checkpoint
        on_rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        good = lookup.by_step(self.folder)
        saved = f"The last good checkpoint is {good[-1]}" if good else "There is no checkpoint yet"
        message = (
            f"Step {step}{on_rank}: {finding}.\n{saved}.\n"
            "To train on regardless, type callbacks.non_finite=null."
        )
        log.error(message)
        raise TrainingError(message)


def checkpoints_by(trainer: pl.Trainer, name: str) -> list[ModelCheckpoint]:
    """Return the checkpoint callbacks that monitor a logged value."""
    kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return [callback for callback in kept if callback.monitor == name]


def consequences(trainer: pl.Trainer, name: str, value: float) -> str:
    """Describe what each callback and schedule does with a value that is not finite."""
    text = ""
    for callback in checkpoints_by(trainer, name)[:1]:
        is_best = value == (-math.inf if callback.mode == "min" else math.inf)
        text = (
            f"The checkpoint of this epoch {'becomes' if is_best else 'does not become'} the best. "
        )
    if any(c.monitor == name and c.check_finite for c in trainer.early_stopping_callbacks):
        text += "Early stopping ends the run. "
    if any(c.reduce_on_plateau and c.monitor == name for c in trainer.lr_scheduler_configs):
        text += "The plateau schedule counts this epoch as no improvement. "
    return text


def monitored(trainer: pl.Trainer) -> set[Any]:
    """Return the names of the values that checkpoints, early stopping and schedules monitor."""
    callbacks: Any = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    names = {getattr(callback, "monitor", None) for callback in callbacks}
    return names | {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}


def first_bad_weight(module: nn.Module) -> str | None:
    """Name the first trained parameter that is not finite; synchronise once if all are finite."""
    named = [(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad]
    # A sum is fast to compute. It is not finite if an element is not, or if it overflows.
    sums = [full_tensor(w.sum()).to(sum_dtype(w.device)) for _, w in named] or [torch.zeros(())]
    if math.isfinite(torch.stack(sums).sum().item()):
        return None
    return next((name for name, weight in named if not full_tensor(weight.isfinite().all())), None)
