from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from harness.data.batches import GlobalBatchSampler


class UnevenBatches(pl.Callback):
    """Give every sample of a global batch the same say in the gradient.

    Processes, and batches accumulated for one step, are averaged with equal weights. Where they
    hold shares of unequal size, as in an epoch's last batch, each share's gradient is multiplied
    by ``GlobalBatchSampler.weight``. Losses and logged values stay as they are. Exact for a loss
    that is a mean over samples.
    """

    weight = 1.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look up how much this process's share counts."""
        sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
        self.weight = 1.0
        if isinstance(sampler, GlobalBatchSampler):
            self.weight = sampler.weight(batch_idx)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Scale what flows back from the loss, not the loss."""
        weight = self.weight
        if weight != 1.0:
            loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]
