"""Data whose loaders depend on the epoch in which they are made."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Data(pl.LightningDataModule):
    """Loaders have more samples in later epochs."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.inputs = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))

    def loader(self, num_samples: int) -> DataLoader[Any]:
        assert self.trainer is not None
        level = self.trainer.current_epoch
        data = TensorDataset(self.inputs[: num_samples + 10 * level] * (1 + level))
        return DataLoader(data, 25, shuffle=num_samples == 30)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(30)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(10)


class Module(pl.LightningModule):
    """A linear network."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)
