"""Stop a run at a number that is not finite, before a checkpoint can hold it."""

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
STEPS_BETWEEN = 20  # a copy from a GPU takes a part of a small step
AT_ONCE = "cpu"  # the device whose numbers are read without waiting


class NonFinite(pl.Callback):
    """Stop the run at a loss, gradient, weight or first objective that is not finite; name it.

    Each loss is looked at before its backward pass. A GPU notes the first bad step, and copies it
    to the host every ``STEPS_BETWEEN``, where it is read so many steps later: no step waits. A
    checkpoint does. A gradient that is not finite makes its weight so in the same step: the next
    loss shows it. Weights that no loss shows are looked at before a checkpoint. Gradients that are
    too large for ``16-mixed`` are left to its scaler.

    Args:
        folder: where the checkpoints are that a run goes on from.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.warned: set[str] = set()  # monitored values
        self.was_finite: set[str] = set()
        self.on_train_start()

    def on_train_start(self, *_: Any) -> None:
        """Forget the losses of an earlier training."""
        self.first_bad_step = torch.tensor(math.inf)
        self.copied = torch.tensor(math.inf)  # the same, as of some steps before

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Look at the loss, or let the device note it."""
        if loss.dtype == torch.float16 and getattr(trainer.precision_plugin, "scaler", None):
            return  # the scaler has multiplied the loss, perhaps by too much for so few bits
        step = trainer.global_step
        if loss.device.type != AT_ONCE:
            bad_step = torch.where(loss.detach().isfinite(), math.inf, float(step))
            before = self.first_bad_step.to(loss.device, non_blocking=True)
            self.first_bad_step = torch.minimum(before, bad_step)
            if step % STEPS_BETWEEN == 0:
                self._look(trainer, self.copied)
                if loss.is_cuda and not self.copied.is_pinned():
                    self.copied = self.copied.pin_memory()
                self.copied.copy_(self.first_bad_step, non_blocking=True)
        elif not math.isfinite(value := loss.item()):
            if weight := first_bad_weight(pl_module):
                if step == 0:
                    self._stop(trainer, 0, f"{weight} is not finite as training begins")
                # The step before this one has spoiled it.
                self._stop(trainer, step - 1, f"the gradient of {weight} was not finite")
            self._stop(trainer, step, f"the loss is {value}, and every weight is finite")

    def state_dict(self) -> dict[str, Any]:
        """Keep which values were finite once."""
        return {"was_finite": sorted(self.was_finite)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Know them again."""
        self.was_finite = {*state_dict["was_finite"]}

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Stop where no value of an objective was finite yet; later, warn once."""
        if stage == "train_step" or trainer.state.fn != "fit":
            return
        read = monitored(trainer) & values.keys()
        bad = {name for name in read if not math.isfinite(values[name])}
        self.was_finite |= read - bad
        for name in sorted(bad - self.warned):
            self.warned.add(name)
            sentence = f"{name} is {values[name]} in epoch {epoch}"
            if checkpoints_by(trainer, name) and name not in self.was_finite:
                message = (
                    f"{sentence}, the first that was evaluated: no checkpoint could be the best.\n"
                    f"Look at what logs {name}, or choose another objective=<name>. "
                    "callbacks.non_finite=null trains on."
                )
                if trainer.is_global_zero:
                    log.error(message)
                raise TrainingError(message)
            if trainer.is_global_zero:
                text = consequences(trainer, name, values[name])
                log.warning("%s. %sFurther ones are not told.", sentence, text)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep weights that are not finite out of every checkpoint."""
        self._look(trainer, self.first_bad_step)  # synchronises
        if weight := first_bad_weight(pl_module):
            self._stop(trainer, trainer.global_step, f"{weight} is not finite, and was not saved")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the last losses, and at the weights after the last step."""
        self.on_save_checkpoint(trainer, pl_module, {})

    def _look(self, trainer: pl.Trainer, first_bad_step: Tensor) -> None:
        if (step := first_bad_step.item()) < math.inf:
            what = "the loss is not finite; trainer.detect_anomaly=true names the operation"
            self._stop(trainer, int(step), what)

    def _stop(self, trainer: pl.Trainer, step: int, what: str) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, DurableCheckpointIO):
            io.finish()  # the last checkpoint may be on its way to the disk
        where = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        good = lookup.by_step(self.folder)
        saved = f"The last good checkpoint is {good[-1]}" if good else "There is no checkpoint yet"
        message = f"Step {step}{where}: {what}.\n{saved}. callbacks.non_finite=null trains on."
        log.error(message)
        raise TrainingError(message)


def checkpoints_by(trainer: pl.Trainer, name: str) -> list[ModelCheckpoint]:
    """Return the checkpoint callbacks that go by a logged value."""
    kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return [callback for callback in kept if callback.monitor == name]


def consequences(trainer: pl.Trainer, name: str, value: float) -> str:
    """Say what becomes of a value that is not finite."""
    text = ""
    for callback in checkpoints_by(trainer, name)[:1]:
        is_best = value == (-math.inf if callback.mode == "min" else math.inf)
        text = f"Its checkpoint counts as {'the' if is_best else 'no'} best. "
    if any(c.monitor == name and c.check_finite for c in trainer.early_stopping_callbacks):
        text += "Early stopping ends the run. "
    if any(c.reduce_on_plateau and c.monitor == name for c in trainer.lr_scheduler_configs):
        text += "The plateau schedule counts it as no improvement. "
    return text


def monitored(trainer: pl.Trainer) -> set[Any]:
    """Return the names of the logged values that checkpoints, stopping and schedules go by."""
    callbacks: Any = [*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks]
    names = {getattr(callback, "monitor", None) for callback in callbacks}
    return names | {c.monitor for c in trainer.lr_scheduler_configs if c.reduce_on_plateau}


def first_bad_weight(module: nn.Module) -> str | None:
    """Name the first trained parameter that is not finite; wait for the device once."""
    named = [(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad]
    # A sum is fast, and not finite where an element is not; large elements may make it so as well.
    sums = [full_tensor(w.sum()).to(sum_dtype(w.device)) for _, w in named] or [torch.zeros(())]
    if math.isfinite(torch.stack(sums).sum().item()):
        return None
    return next((name for name, weight in named if not full_tensor(weight.isfinite().all())), None)
