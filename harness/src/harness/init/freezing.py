"""Parts of a module that are not trained, or only from some epoch on."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from torch import nn

from harness.errors import UserError
from harness.init.settings import bare, check_parts
from harness.kinds import RUNNING_STATS_NORMS
from harness.names import is_below


class Freezing(pl.Callback):
    """Keep some parts from being trained, and the statistics of their norms as they are.

    The epoch alone decides what is frozen, so a resumed run needs no state of this callback. Frozen
    parameters stay in the optimizer, which passes over what has no gradient. From the epoch
    ``unfreeze_at_epoch``, counted from 0, they are trained; ``None`` is never.
    """

    def __init__(self, parts: Sequence[str], unfreeze_at_epoch: int | None = None) -> None:
        self.parts, self.unfreeze_at_epoch = list(parts), unfreeze_at_epoch
        self.names: list[str] = []  # parameters to thaw; those that the author froze are not
        self.norms: list[nn.Module] = []

    def freeze(self, module: pl.LightningModule) -> None:
        """Freeze the parts.

        Raises:
            UserError: if there is no such part, or nothing is left to train.
        """
        said = f"init.freeze={self.parts}"
        tensors = [*module.named_parameters(), *module.named_buffers()]
        check_parts(said, self.parts, [bare(name) for name, _ in tensors])
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name in trained if is_below(bare(name), self.parts)]
        if len(self.names) == len(trained):
            raise UserError(f"{said} leaves nothing to train. Name a smaller part.")
        for name in self.names:
            module.get_parameter(name).requires_grad_(False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the norms now, because a strategy may have replaced them until here."""
        self.norms = [
            layer
            for name, layer in pl_module.named_modules()
            if isinstance(layer, RUNNING_STATS_NORMS) and is_below(bare(name), self.parts)
        ]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Put frozen norms into evaluation mode, which Lightning and authors undo, or thaw."""
        thaws_at = self.unfreeze_at_epoch
        is_thawed = thaws_at is not None and trainer.current_epoch >= thaws_at
        for norm in self.norms:
            norm.train(is_thawed)
        if is_thawed:
            for name in self.names:
                pl_module.get_parameter(name).requires_grad_(True)
            self.names, self.norms = [], []
