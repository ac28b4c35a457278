"""Freeze parts of a module, for the whole training or until an epoch."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
from torch import nn

from harness.errors import UserError
from harness.init.settings import bare_name, check_parts
from harness.keys import is_within
from harness.kinds import RUNNING_STATS_NORMS


class Freezing(pl.Callback):
    """Freeze the parameters of some parts, and the statistics of their norms.

    Only the epoch decides what is frozen, so a resumed run needs no state of this callback. Frozen
    parameters stay in the optimizer, which skips parameters without a gradient.

    Args:
        parts: names of the parts, such as ``net.backbone``.
        unfreeze_at_epoch: the epoch, counted from 0, that trains the parts again; ``None``: never.
    """

    def __init__(self, parts: Sequence[str], unfreeze_at_epoch: int | None = None) -> None:
        self.parts, self.unfreeze_at_epoch = list(parts), unfreeze_at_epoch
        self.names: list[str] = []  # parameters to thaw, without those that the module froze itself
        self.norms: list[nn.Module] = []

    def freeze(self, module: pl.LightningModule) -> None:
        """Freeze the parts' parameters.

        Raises:
            UserError: a part does not exist, or no parameter is left to train.
        """
        setting = f"init.freeze={self.parts}"
        tensors = [*module.named_parameters(), *module.named_buffers()]
        check_parts(setting, self.parts, [bare_name(name) for name, _ in tensors])
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        self.names = [name for name in trained if is_within(bare_name(name), self.parts)]
        if len(self.names) == len(trained):
            raise UserError(f"{setting} leaves nothing to train. Name a smaller part.")
        for name in self.names:
            module.get_parameter(name).requires_grad_(False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the norms now, because a strategy may replace them before the training starts."""
        self.norms = [
            layer
            for name, layer in pl_module.named_modules()
            if isinstance(layer, RUNNING_STATS_NORMS) and is_within(bare_name(name), self.parts)
        ]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Keep frozen norms in evaluation mode, or thaw all parts.

        Lightning, or the module itself, may have put the norms back into training mode.
        """
        thaws_at = self.unfreeze_at_epoch
        is_thawed = thaws_at is not None and trainer.current_epoch >= thaws_at
        for norm in self.norms:
            norm.train(is_thawed)
        if is_thawed:
            for name in self.names:
                pl_module.get_parameter(name).requires_grad_(True)
            self.names, self.norms = [], []
