"""Stop a run that cannot learn: a loss that is no number, no loss at all, weights that stay."""

import logging
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor

from harness.errors import TrainingError
from harness.names import few
from harness.shards import has_parts
from harness.watch.hashing import hashes

log = logging.getLogger(__name__)


class Learning(pl.Callback):
    """Refuse a vector as a loss; after the first epoch, stop where nothing was learnt in it.

    Weights are compared by hashes. Not compared are those of which this process has a part (fsdp),
    and those under a gradient scaler, which may leave out every step of a short epoch.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hash the weights that the optimizers have, at the start of the first epoch."""
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self.has_loss, self.names, self.before = False, list[str](), None
        optimized = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]}
        named = [(n, p) for n, p in pl_module.named_parameters() if id(p) in optimized]
        if trainer.global_step or is_scaled or not named or any(has_parts(p) for _, p in named):
            return
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.before = hashes(self.parameters, pl_module.device)
        self.rate = largest_rate(trainer)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Refuse a loss that is more than one number.

        Raises:
            ValueError: with its shape; ``run.mistakes`` adds the place and what to write.
        """
        self.has_loss = True
        if loss.numel() != 1:
            raise ValueError(f"training_step returned a loss of shape {tuple(loss.shape)}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the first epoch.

        Raises:
            TrainingError: in every process, if there was no loss, or no weight has changed.
        """
        before, self.before = self.before, None
        if before is None or not any(parameter.requires_grad for parameter in self.parameters):
            return
        name = type(pl_module).__name__
        if pl_module.automatic_optimization and not self.has_loss:
            stop(trainer, f"{name}.training_step returned no loss in the first epoch: return it.")
        rate = max(self.rate, largest_rate(trainer))
        if rate and torch.equal(before, hashes(self.parameters, pl_module.device)):
            stop(
                trainer,
                f"No weight of {name} has changed in the first epoch, with a learning rate of "
                f"{rate:g}. The optimizer has {few(self.names)}: does the loss depend on them?\n"
                "Layers in a plain list or dict belong in nn.ModuleList or nn.ModuleDict.",
            )


def largest_rate(trainer: pl.Trainer) -> float:
    """The largest learning rate of all groups; one that lacks a rate counts as 1."""
    groups: list[dict[str, Any]] = [g for o in trainer.optimizers for g in o.param_groups]
    return max(float(group.get("lr", 1.0)) for group in groups)


def stop(trainer: pl.Trainer, message: str) -> NoReturn:
    """Log a message once, and end the run in every process."""
    if trainer.is_global_zero:
        log.error(message)
    raise TrainingError(message)
