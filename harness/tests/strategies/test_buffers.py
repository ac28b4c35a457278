"""DDP broadcasts rank 0's buffers before each training step, and once for an evaluation."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.training.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Centres(nn.Module):
    """A layer that writes a buffer in training, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        before = self.centre.clone()
        self.centre.lerp_(x.detach().mean(0), 0.5)
        return x - before


class Normalises(pl.LightningModule):
    """Store BatchNorm's mean, as each step and each evaluation sees it."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        extra: list[nn.Module] = {
            "none": [],
            "writes": [Centres()],
        }[layer]
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), *extra, nn.Linear(3, 1))
        self.samples = torch.randn(12, 2)
        self.means: dict[str, list[Any]] = {"train": [], "val": []}

    def forward(self, x: Tensor) -> Tensor:
        self.means["train" if self.training else "val"].append(self.net[1].running_mean.tolist())
        return self.net(x)

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor) -> None:
        self(batch)

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(layer: str, folder: Path) -> None:
    trainer = small_trainer(2, max_epochs=2, limit_val_batches=2)
    trainer.fit(module := Normalises(layer))
    torch.save(module.means, folder / f"{trainer.global_rank}")
    close_process_group()


@pytest.mark.parametrize("layer", ["none", "writes"])
def test_each_step_and_evaluation_has_the_buffers_of_rank_0(layer: str, tmp_path: Path) -> None:
    in_processes(2, fit, layer, tmp_path)
    means, means_of_1 = (torch.load(tmp_path / f"{rank}") for rank in range(2))
    assert means["train"] == means_of_1["train"]
    assert means["val"][0] == means_of_1["val"][0]
    assert len({*map(tuple, means["train"])}) == 6
