"""Train the same batches under dp and on one device: the loss of each step."""

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.parity.global_batches import GlobalBatches
from harness.training.attachments import Attachments

UPSTREAM_WARNINGS = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        # Lightning 2.6 walks batches with names that torch 2.13 calls old.
        r"`isinstance\(treespec, LeafSpec\)` is deprecated",
        # The trainers of these tests are small on purpose.
        "The '.*_dataloader' does not have many workers",
        "`max_epochs` was not set",
        "You are using a custom batch sampler",
        ".*Skipping val loop",
        # Dynamo hides this warning of its own, but not where warnings are errors.
        "The .grad attribute of a Tensor that is not a leaf",
    )
]


class Module(pl.LightningModule):
    """A classifier that calls itself twice in a step, and knows nothing of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y) + F.cross_entropy(self(x / 2), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Batches(pl.LightningDataModule):
    """An epoch of batches of these sizes, of which the last may be smaller."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        x = torch.randn(sum(sizes), 8, generator=torch.Generator().manual_seed(0))
        self.size, self.samples = sizes[0], TensorDataset(x, x[:, :5].argmax(dim=1))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=self.size)


def trainer(strategy: Any, callbacks: Any = (), **kwargs: Any) -> pl.Trainer:
    """A quiet Trainer on two logical devices."""
    quiet = ("progress_bar", "model_summary", "checkpointing")
    kwargs = {"accelerator": "cpu", "devices": 2, "max_steps": 2, "logger": False} | kwargs
    kwargs |= {f"enable_{what}": False for what in quiet}
    callbacks = [Attachments(), GlobalBatches(seed=0), *callbacks]
    return pl.Trainer(
        strategy=strategy, callbacks=callbacks, use_distributed_sampler=False, **kwargs
    )


def losses(strategy: Any, *sizes: int, **settings: Any) -> list[float]:
    """The loss of every batch in 20 steps."""
    torch.manual_seed(1)
    module = Module()
    trainer(strategy, max_steps=20, **settings).fit(module, Batches(*sizes))
    return module.losses
