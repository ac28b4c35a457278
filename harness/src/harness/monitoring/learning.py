"""Stop a run that cannot learn: the loss is a vector or missing, or no weight changes."""

import logging
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from harness.display import join_first
from harness.errors import TrainingError, UserError
from harness.monitoring.replicas import sums_of_bits
from harness.sharded import is_sharded

log = logging.getLogger(__name__)


class Learning(pl.Callback):
    """Refuse a vector as a loss, and stop after the first epoch if no weight has changed.

    Weights are not compared under fsdp, because a rank holds only shards of them. With a gradient
    scaler they are not compared either, because the scaler may skip every step of a short epoch.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store checksums of the weights that the optimizers train.

        Raises:
            UserError: if an optimizer has only parameters of another module.
        """
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        optimized = {id(parameter) for group in groups for parameter in group["params"]}
        named = [(n, p) for n, p in pl_module.named_parameters() if id(p) in optimized]
        own = {id(parameter) for parameter in pl_module.parameters()}
        for optimizer in trainer.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            if parameters and own.isdisjoint(map(id, parameters)):
                raise UserError(
                    f"configure_optimizers of {type(pl_module).__name__} returns "
                    f"{type(optimizer).__name__} over parameters of another module, so no weight "
                    f"of {type(pl_module).__name__} would be trained.\n"
                    f"Write {type(optimizer).__name__}(self.parameters(), ...)."
                )
        self.has_batch, self.has_loss, self.before = False, False, None
        if trainer.global_step or is_scaled or any(is_sharded(p) for _, p in named):
            return
        self.names, self.parameters = [name for name, _ in named], [p for _, p in named]
        self.before = sums_of_bits(self.parameters, pl_module.device)
        self.rate = largest_rate(trainer)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Refuse a loss that is more than one number.

        Raises:
            ValueError: with the loss's shape; ``training.user_errors`` adds the line and the fix.
        """
        self.has_loss = True
        if loss.numel() != 1:
            raise ValueError(f"training_step returned a loss of shape {tuple(loss.shape)}")

    def on_train_batch_end(self, *_: Any) -> None:
        """Note that the epoch had a batch; a stream may have none."""
        self.has_batch = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise an error on every rank if the first epoch had no loss or has changed no weight."""
        before, self.before = self.before, None
        if before is None or not self.has_batch:
            return
        if not any(parameter.requires_grad for parameter in self.parameters):
            return
        name, rate = type(pl_module).__name__, max(self.rate, largest_rate(trainer))
        message = ""
        if pl_module.automatic_optimization and not self.has_loss:
            message = (
                f"{name}.training_step returned no loss in the first epoch.\n"
                "End training_step with `return loss`."
            )
        elif rate and torch.equal(before, sums_of_bits(self.parameters, pl_module.device)):
            message = (
                f"No weight of {name} has changed in the first epoch, with a learning rate of "
                f"{rate:g}.\nThe optimizer trains {join_first(self.names)}: make the loss depend "
                "on these weights.\nPut layers of a list or dict into nn.ModuleList or "
                "nn.ModuleDict."
            )
        if message:
            if trainer.is_global_zero:
                log.error(message)
            raise TrainingError(message)


def largest_rate(trainer: pl.Trainer) -> float:
    """Return the largest learning rate of all parameter groups; a group without one counts as 1."""
    groups: list[dict[str, Any]] = [g for o in trainer.optimizers for g in o.param_groups]
    return max((float(group.get("lr", 1.0)) for group in groups), default=0.0)
