"""Modules and data as others write them, without a thought of this project."""

from typing import Any

import lightning as L
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def samples(count: int) -> TensorDataset:
    numbers = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(numbers, numbers.sum(1, keepdim=True))


class Bare(pl.LightningModule):
    """Trains, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Silent(Bare):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)


class Validated(Bare):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Tested(Validated):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


class WithLoaders(Tested):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(32), 8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(16), 8)

    test_dataloader = predict_dataloader = val_dataloader


class WithCallbacks(Tested):
    def configure_callbacks(self) -> list[pl.Callback]:
        return [pl.callbacks.ModelCheckpoint(monitor="val_loss")]


class LateMetrics(Validated):
    """Logs in the last hook of an epoch, and a metric that is no number."""

    def on_train_epoch_end(self) -> None:
        self.log("quality", 1.0)
        self.trainer.callback_metrics["matrix"] = torch.zeros(2, 2)


class TrainOnly(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(32), 8, shuffle=True)


class TrainAndVal(TrainOnly):
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(16), 8)


class Whole(TrainAndVal):
    """Makes its test data for what uses them alone."""

    def setup(self, stage: str) -> None:
        if stage in ("test", "predict"):
            self.tested = samples(11)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.tested, 4)

    predict_dataloader = test_dataloader
