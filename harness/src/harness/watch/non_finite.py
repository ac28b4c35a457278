import logging
import math
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from harness.checkpoints import lookup
from harness.checkpoints.writing import DurableCheckpointIO
from harness.errors import TrainingError
from harness.shards import whole

log = logging.getLogger(__name__)


class NonFinite(pl.Callback):
    """Stop the run at a loss, a gradient or a weight that is not finite, and name it.

    Each loss is looked at before its backward pass. A gradient that is not finite makes its weight
    so in the same step: the next loss shows it, while the weights still tell where it was. Where
    no loss shows it, the check before a checkpoint does, so that none ever holds such a weight.
    On a GPU a loss is copied beside the training, and looked at when it has come: a few steps
    later, and no step waits.

    Gradients that are too large for ``16-mixed`` are its scaler's affair.

    Args:
        folder: where the checkpoints are that a run goes on from.
        every_gradient: look at each gradient before it is applied. The weights stay good, and the
            step and the gradient are named on a GPU as well, which then waits in every step.
    """

    def __init__(self, folder: str | Path, every_gradient: bool = False) -> None:
        self.folder, self.every_gradient = Path(folder), every_gradient
        self.coming: deque[tuple[int, Tensor, Any]] = deque()  # losses on their way to the host

    def on_train_start(self, *_: Any) -> None:
        """Forget what an earlier training has sent."""
        self.coming.clear()

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Look at the loss, or send it to be looked at."""
        if loss.dtype == torch.float16 and getattr(trainer.precision_plugin, "scaler", None):
            return  # it has multiplied the loss, perhaps by too much for so few bits
        if loss.device.type == "cuda":
            self._look(trainer)
            self._send(trainer.global_step, loss)
        elif not math.isfinite(value := loss.item()):
            step = trainer.global_step
            if bad := first_bad_weight(pl_module):  # this step has not changed it yet
                self._stop(trainer, step - 1, f"the gradient of {bad} was not finite")
            self._stop(trainer, step, f"the loss is {value}, and every weight is finite")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Look at the gradients, if asked to."""
        if not self.every_gradient or getattr(trainer.precision_plugin, "scaler", None):
            return
        named = [(name, p.grad) for name, p in pl_module.named_parameters() if p.grad is not None]
        if whole(get_total_norm([gradient for _, gradient in named])).isfinite():
            return
        for name, gradient in named:  # finite ones may be too large for their norm
            if not whole(gradient.isfinite().all()):
                self._stop(trainer, trainer.global_step, f"the gradient of {name} is not finite")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep bad weights out of every checkpoint."""
        self._look(trainer, wait=True)
        if bad := first_bad_weight(pl_module):
            self._stop(trainer, trainer.global_step, f"{bad} is not finite, and was not saved")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the last losses, and at what the last step has done to the weights."""
        self.on_save_checkpoint(trainer, pl_module, {})

    def _send(self, step: int, loss: Tensor) -> None:
        copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
        copy.copy_(loss.detach(), non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        self.coming.append((step, copy, arrival))

    def _look(self, trainer: pl.Trainer, wait: bool = False) -> None:
        """Look at the losses that have come; with ``wait``, at all."""
        if wait and self.coming:
            self.coming[-1][2].synchronize()
        while self.coming and self.coming[0][2].query():
            step, copy, _ = self.coming.popleft()
            if not math.isfinite(value := copy.item()):
                self._stop(
                    trainer,
                    step,
                    f"the loss is {value}; callbacks.non_finite.every_gradient=true shows whether "
                    "a gradient was before it",
                )

    def _stop(self, trainer: pl.Trainer, step: int, what: str) -> NoReturn:
        self.coming.clear()
        io = trainer.strategy.checkpoint_io
        if isinstance(io, DurableCheckpointIO):
            io.finish()  # the last one may be on its way to the disk
        where = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        saved = "There is no checkpoint yet."
        if good := lookup.by_step(self.folder):
            saved = f"The last good checkpoint is {good[-1]}."
        message = (
            f"Step {step}{where}: {what}.\n{saved} callbacks.non_finite=null trains on regardless."
        )
        log.error(message)
        raise TrainingError(message)


def first_bad_weight(module: nn.Module) -> str | None:
    """The name of the first trained parameter that is not finite; waits for the device once."""
    named = [(name, p.detach()) for name, p in module.named_parameters() if p.requires_grad]
    if not named:
        return None
    # A sum is fast, and not finite where an element is not; large elements may make it so as well.
    sums = torch.stack([whole(weight.sum()).to(torch.float64) for _, weight in named]).tolist()
    suspects = [pair for pair, total in zip(named, sums, strict=True) if not math.isfinite(total)]
    return next((name for name, weight in suspects if not whole(weight.isfinite().all())), None)
