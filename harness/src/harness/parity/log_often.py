"""``Mean`` and ``is_logged``: two ways to log values of training steps at a low cost."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from harness.compat.final_values import row_is_due


class Mean(Metric):
    """A weighted mean that is cheap enough to update at every training step.

    Unlike ``torchmetrics.MeanMetric``, it neither converts scalars nor looks for NaN. So ``update``
    needs half the time on a CPU, and never synchronises with a GPU.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=gather_scalar)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: Tensor | float) -> None:
        """Add a mean over samples whose weights sum up to ``weight``."""
        self.total.add_(value * weight)  # in place: nn.Module's setattr is slow
        self.weight.add_(weight)

    def compute(self) -> Tensor:
        """Return the weighted mean of all values since the last ``reset``."""
        return self.total / self.weight


def gather_scalar(value: Tensor, group: Any = None) -> list[Tensor]:
    """Gather a scalar from all ranks, without the barrier of torchmetrics."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, value, group=group)
    return gathered


def is_logged(module: pl.LightningModule, batch_idx: int) -> bool:
    """Return whether the loggers get the values that the training step logs for this batch.

    Use it to skip ``self.log`` for most batches. For a small network, ``self.log`` is a large
    fraction of the step's time.
    """
    trainer = module.trainer
    ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return ends_step and row_is_due(trainer)
