"""Stop a run at a number that is not finite, before a checkpoint can hold it."""

import logging
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from harness.checkpoints import lookup
from harness.checkpoints.writing import DurableCheckpointIO
from harness.errors import TrainingError
from harness.shards import whole

log = logging.getLogger(__name__)


class NonFinite(pl.Callback):
    """Stop the run at a loss, a gradient or a weight that is not finite, and name it.

    Each loss is looked at before its backward pass. A gradient that is not finite makes its weight
    so in the same step: the next loss shows it. Weights that no loss shows are looked at before a
    checkpoint. On a GPU a loss is copied beside the training and looked at when it has arrived, a
    few steps later: no step waits for it. Gradients that are too large for ``16-mixed`` are left to
    its scaler.

    Args:
        folder: where the checkpoints are that a run goes on from.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.sent: deque[tuple[int, Tensor, Any]] = deque()  # losses on their way to the host

    def on_train_start(self, *_: Any) -> None:
        """Forget the losses of an earlier training."""
        self.sent.clear()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Look at the loss, or send it to the host."""
        if loss.dtype == torch.float16 and getattr(trainer.precision_plugin, "scaler", None):
            return  # the scaler has multiplied the loss, perhaps by too much for so few bits
        step = trainer.global_step
        if loss.device.type == "cuda":
            self._look_at_arrived(trainer)
            copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
            copy.copy_(loss.detach(), non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record()
            self.sent.append((step, copy, arrival))
        elif not math.isfinite(value := loss.item()):
            if weight := first_bad_weight(pl_module):  # spoiled by the step before this one
                self._stop(trainer, step - 1, f"the gradient of {weight} was not finite")
            self._stop(trainer, step, f"the loss is {value}, and every weight is finite")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep weights that are not finite out of every checkpoint."""
        if self.sent:
            self.sent[-1][2].synchronize()
        self._look_at_arrived(trainer)
        if weight := first_bad_weight(pl_module):
            self._stop(trainer, trainer.global_step, f"{weight} is not finite, and was not saved")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the last losses, and at the weights after the last step."""
        self.on_save_checkpoint(trainer, pl_module, {})

    def _look_at_arrived(self, trainer: pl.Trainer) -> None:
        while self.sent and self.sent[0][2].query():
            step, copy, _ = self.sent.popleft()
            if not math.isfinite(value := copy.item()):
                more = "trainer.detect_anomaly=true names the operation"
                self._stop(trainer, step, f"the loss is {value}; {more}")

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


def first_bad_weight(module: nn.Module) -> str | None:
    """The name of the first trained parameter that is not finite; waits for the device once."""
    named = [(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad]
    # A sum is fast, and not finite where an element is not; large elements may make it so as well.
    sums = [whole(weight.sum()).to(torch.float64) for _, weight in named] or [torch.zeros(())]
    if math.isfinite(torch.stack(sums).sum().item()):
        return None
    return next((name for name, weight in named if not whole(weight.isfinite().all())), None)
