"""Networks and modules that a switch makes faster, wrong, or nothing of it."""

import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PAUSE_SECONDS = 0.03  # ten times a step


class Paused(nn.Module):
    """Waits in each call, once for every switch that is off.

    Args:
        in_features: of a flattened image.
        num_classes: of the logits.
        kind: ``follows`` computes the same with every switch; ``diverges`` and ``overflows`` do
            not in bf16, and ``drops`` draws random numbers.
    """

    def __init__(self, in_features: int, num_classes: int, kind: str = "follows") -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.head = nn.Linear(in_features, num_classes)
        self.dropout = nn.Dropout(0.5 if kind == "drops" else 0.0)
        self.wrong = {"diverges": 3.0, "overflows": torch.inf}.get(kind, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, H, W) to logits (B, num_classes)."""
        is_bf16 = torch.is_autocast_enabled("cpu")
        is_channels_last = self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        time.sleep(PAUSE_SECONDS * ((not is_bf16) + (not is_channels_last)))
        unused = 0 * self.conv(torch.cat([x, x], 1)).mean()
        logits: Tensor = self.head(self.dropout(x.flatten(1))) + unused
        return logits * (self.wrong if is_bf16 else 1.0)


class ByHand(pl.LightningModule):
    """Its own loader, optimizers, schedule and steps.

    Args:
        backward: ``lightning`` calls ``manual_backward``, ``torch`` goes past it,
            ``not_finite`` and ``bug`` train on nothing.
    """

    def __init__(self, backward: str = "lightning") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backward_of = backward
        self.net = nn.Linear(4, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(50, 4), torch.randn(50, 2)), batch_size=10)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        if self.backward_of == "bug":
            loss = loss.no_such_method()
        if self.backward_of == "not_finite":
            loss = loss * torch.nan
        if self.backward_of == "torch":
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        schedule: Any = self.lr_schedulers()
        schedule.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)]
