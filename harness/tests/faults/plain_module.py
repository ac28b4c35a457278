"""A module that logs in every way that Lightning offers, and depends on all generators."""

import random
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.collections import MetricCollection


class PlainModule(pl.LightningModule):
    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)
        )
        self.head = nn.Linear(16, 10)
        classes = {"num_classes": 10, "average": "micro"}
        self.scores = MetricCollection(
            {"accuracy": MulticlassAccuracy(**classes), "f1": MulticlassF1Score(**classes)},
            prefix="epoch/",
        )
        self.running = MulticlassAccuracy(10)
        self.scale = 0.0  # no checkpoint has it
        self.register_buffer("num_epochs", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        """Set an epoch's values as users do: a weight, a mode, a count, an optimizer's setting."""
        self.scale = 0.01 * (1 + self.current_epoch)
        self.net[2].train(self.current_epoch != 1)
        self.num_epochs += 1
        self.trainer.optimizers[0].param_groups[0]["momentum"] *= 0.9
        self.log("scale", self.scale)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        noise = self.scale * (random.random() + np.random.rand())
        logits = self.head(self.net(inputs + noise))
        loss = F.cross_entropy(logits, labels)
        self.scores.update(logits, labels)
        self.running(logits, labels)
        self.log("running", self.running, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("total", loss, reduce_fx="sum", on_step=False, on_epoch=True)
        if batch_idx == 1:
            self.log("second", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.scores.compute())
        self.scores.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.head(self.net(inputs + 0.01 * torch.randn(1)))
        self.log("val/loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val/accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        self.log("test/loss", F.cross_entropy(self.head(self.net(inputs)), labels))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"class": self.head(self.net(batch[0])).argmax(1)}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TwoPaces(PlainModule):
    """Manual optimisation: the head's gradients wait for every third batch."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        body, head = self.optimizers()
        body.step()
        body.zero_grad()
        if batch_idx % 3 == 2:
            head.step()
            head.zero_grad()

    def on_train_batch_end(self, *_: Any) -> None:
        """Log outside of a step, whose precision Lightning sets."""
        self.log("rate", 0.1 / 3, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return [body, torch.optim.Adam(self.head.parameters(), lr=0.01)]
