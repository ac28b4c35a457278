"""Draws in hooks, each of which decides the steps that follow."""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import Classifier


class DrawnFactor(Classifier):
    """Scales a batch by a number that is drawn before it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.f = random.choice([0.5, 1.0, 1.5])

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(self.f * x), y)


class MaskOfEpoch(Classifier):
    """Hides the same measures for an epoch."""

    def on_train_epoch_start(self) -> None:
        self.mask = (torch.rand(6) < 0.6).double()

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(self.mask * x), y)


class LayerDrop(Classifier):
    """Leaves out a residual layer in some steps (LayerDrop)."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(6, 6)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.keeps = float(torch.rand(()) < 0.5)

    def forward(self, x: Tensor) -> Any:
        return self.net(x + self.block(x).tanh() * (self.keeps if self.training else 0.5))


class ScheduledSampling(Classifier):
    """Feeds labels in place of predictions, ever less often."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 6)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_forced = np.random.rand() < 0.9**self.global_step

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        first = self(x)
        fed = y if self.is_forced else first.argmax(1)
        return F.cross_entropy(first, y) + F.cross_entropy(self(x + self.embedding(fed)), y)


class MaskRatio(Classifier):
    """Draws for each epoch how much is masked (MaskGIT)."""

    def on_train_epoch_start(self) -> None:
        self.num_masked = int(np.random.randint(1, 5))

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone()
        x[:, : self.num_masked] = 0
        return F.cross_entropy(self(x), y)


class DrawnAfterwards(Classifier):
    """Draws the temperature of the next step."""

    temperature = 1.0

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x) / self.temperature, y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.temperature = random.uniform(0.5, 2)


class DrawnProjection(Classifier):
    """Draws a random projection as training starts (random targets)."""

    def on_train_start(self) -> None:
        self.projection = torch.randn(6, 3, dtype=torch.float64)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        return F.cross_entropy(logits, y) + 0.1 * F.mse_loss(logits, x @ self.projection)


class DrawWidth(pl.Callback):
    """Draws how wide the network is in the next step."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.width = random.choice([4, 6, 8])


class Slimmable(Classifier):
    """Trains with a part of its hidden units, which a callback draws."""

    width = 8

    def configure_callbacks(self) -> Any:
        return [DrawWidth()]

    def forward(self, x: Tensor) -> Any:
        hidden = self.net[:2](x)
        return self.net[2](hidden * (torch.arange(8) < (self.width if self.training else 8)))


class AugmentedOnDevice(Classifier):
    """Adds noise to each sample behind the transfer (Kornia)."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + 0.3 * torch.randn_like(x), y) if self.trainer.training else (x, y)
