"""Parts of a module that are not trained, or only from some epoch on."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from torch import nn

from harness.errors import UserError
from harness.init.parts import bare, check_parts, typed
from harness.names import is_below
from harness.strategies.sync_batch_norm import NORMS


class Freezing(pl.Callback):
    """Keep some parts from being trained, and the statistics of their BatchNorm as they are.

    What is frozen follows from the epoch alone, so that a run that goes on needs no state of it.
    Frozen parameters stay in the optimizer, which passes over what has no gradient.

    Args:
        parts: names of submodules and parameters, such as ``net.backbone``.
        unfreeze_at_epoch: the epoch, counted from 0, from which on they are trained; ``None``
            for never.
    """

    def __init__(self, parts: Sequence[str], unfreeze_at_epoch: int | None = None) -> None:
        self.parts, self.unfreeze_at_epoch = list(parts), unfreeze_at_epoch
        self.names: list[str] = []  # of what would be trained without this
        self.norms: list[nn.Module] = []

    def freeze(self, module: pl.LightningModule) -> None:
        """Freeze the parts.

        Raises:
            UserError: if there is no such part, or nothing is left to train.
        """
        said = f"init.freeze={typed(self.parts)}"
        tensors = [*module.named_parameters(), *module.named_buffers()]
        check_parts(said, self.parts, [bare(name) for name, _ in tensors])
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.names += [name for name in parameters if is_below(bare(name), self.parts)]
        for name in self.names:
            module.get_parameter(name).requires_grad_(False)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(
                f"{said} freezes every parameter, and nothing is left to train.\n"
                "Name a smaller part, such as all but the last layer."
            )

    def is_frozen_at(self, epoch: int) -> bool:
        """Whether the parts are frozen in an epoch."""
        return self.unfreeze_at_epoch is None or epoch < self.unfreeze_at_epoch

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the norms: strategies may have put others in their place until now."""
        self.norms = [
            layer
            for name, layer in pl_module.named_modules()
            if isinstance(layer, NORMS) and is_below(bare(name), self.parts)
        ]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Do as the epoch asks for, whatever has put norms into training since the last step."""
        if self.is_frozen_at(trainer.current_epoch):
            for norm in self.norms:
                if norm.training:
                    norm.eval()
        elif self.names or self.norms:
            for name in self.names:
                pl_module.get_parameter(name).requires_grad_(True)
            for norm in self.norms:
                norm.train()
            self.names, self.norms = [], []
