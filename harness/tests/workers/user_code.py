"""What a user would write, knowing nothing of this project but ``DataModule``."""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from harness.data.datamodule import DataModule


class UserData(DataModule):
    """Numbers that are the same in every process."""

    def __init__(self, num_train: int = 61, num_test: int = 61, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sizes = {"train": num_train, "test": num_test, "val": num_test, "predict": num_test}

    def make_dataset(self, split: str) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(len(split))
        size = self.sizes[split]
        inputs = torch.randn(size, 6, generator=generator)
        labels = torch.randint(0, 4, (size,), generator=generator)
        everything = RandomlyMoved(TensorDataset(inputs, labels))
        return random_split(everything, [1.0], generator)[0]


class RandomlyMoved(Dataset[Any]):
    """An augmentation that draws from the generators there are, as most do."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.dataset[index]
        moved = torch.randn(1) + random.random() + np.random.rand()
        return inputs + 0.01 * moved.float(), label


class UserModule(pl.LightningModule):
    """Logs plain values in its steps, as most modules do."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.net = nn.Sequential(nn.Linear(6, 8), middle, nn.Tanh(), nn.Linear(8, 4))
        self.accuracy, self.train_accuracy = MulticlassAccuracy(4), MulticlassAccuracy(4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy.update(logits, labels)
        self.log("train/accuracy", self.train_accuracy, on_epoch=True, on_step=False)
        self.log("train/loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        self.log("val/loss", F.cross_entropy(self.net(inputs), labels))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.net(inputs)
        self.accuracy.update(logits, labels)
        self.log("test/accuracy", self.accuracy)
        self.log("test/loss", F.cross_entropy(logits, labels))
        self.log("test/largest", logits.max(), reduce_fx="max", sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, _ = batch
        return {"first": inputs[:, 0], "class": self.net(inputs).argmax(dim=1)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
