"""Modules with a fault that those of tests/modules do not have."""

from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor

from tests.modules.classifiers import BatchNorm, Classifier, SumOfLosses


class SumWithBatchNorm(BatchNorm, SumOfLosses):
    """Normalises over the batch, and adds up losses."""


class CountedTwice(Classifier):
    """Gathers what a metric then adds up once more."""

    def __init__(self) -> None:
        super().__init__()
        self.num = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        mine = torch.tensor(float(len(batch[0])), device=self.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mine)
        self.num.update(mine)

    def on_validation_epoch_end(self) -> None:
        self.log("val/num", self.num)


class Writes(Classifier):
    """Keeps a mean of its inputs in a buffer, which forward writes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * x.mean(dim=0).detach()
        return self.net(x - self.centre)


class Forgets(Classifier):
    """A mean of what it has seen is an attribute, and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x - self.memory), y)
        self.memory = self.memory + 0.1
        return loss
