import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric


class Mean(Metric):
    """A weighted mean, for what is counted at every training step.

    Unlike ``torchmetrics.MeanMetric`` it takes scalars as they are and does not look for NaN,
    which takes half as long on the CPU and never waits for a GPU.
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: Tensor | float) -> None:
        """Count ``value``, the mean of something over samples of this weight in sum."""
        self.total.add_(value * weight)  # torch looks what kind of attribute it is where it is set
        self.weight.add_(weight)

    def compute(self) -> Tensor:
        """The mean over everything counted since the last ``reset``."""
        return self.total / self.weight


def is_logged(module: pl.LightningModule, batch_idx: int) -> bool:
    """Whether what the training step logs for this batch reaches the loggers.

    Most batches log nothing, and ``self.log`` takes a good part of a small network's step.
    """
    trainer = module.trainer
    ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
    log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set untyped
    return ends_step and (module.global_step + 1) % log_every == 0
