"""What modules with one loss have in common."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor


class OneLoss(pl.LightningModule):
    """Trains and evaluates ``loss``, which subclasses write."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)
