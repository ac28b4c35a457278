"""BatchNorm over all ranks has the statistics of one process."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.strategies.sync_batch_norm import SyncBatchNormAnywhere
from harness.training.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Normalises(pl.LightningModule):
    """Five samples in batches of three: the last of three ranks has none of the second batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        self.samples = torch.randn(5, 2, dtype=torch.float64)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, batch_size=3, shuffle=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int, path: Path) -> None:
    trainer = small_trainer(devices, max_epochs=3, plugins=[SyncBatchNormAnywhere()])
    trainer.fit(module := Normalises())
    if trainer.is_global_zero:
        torch.save(module.state_dict(), path)
    close_process_group()


def test_a_sample_that_is_computed_twice_counts_once(tmp_path: Path) -> None:
    for devices in (1, 3):
        in_processes(devices, fit, devices, tmp_path / f"{devices}.pt")
    one, three = (torch.load(tmp_path / f"{devices}.pt") for devices in (1, 3))
    for name, value in one.items():
        assert torch.allclose(value, three[name], rtol=0, atol=1e-12), name
