"""Metrics change their types during updates, and ranks that have had others agree all the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, Metric, SpearmanCorrCoef

from harness.training.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Measures(pl.LightningModule):
    """Nine samples in batches of four: a rank has one batch less, and computes padding."""

    def __init__(self, kind: type[Metric], num_first: int) -> None:
        super().__init__()
        self.net, self.num_first = nn.Linear(1, 1), num_first
        self.is_pair = kind is SpearmanCorrCoef
        self.of_training, self.of_validation = kind(), kind()

    def update(self, metric: Any, x: Tensor) -> None:
        metric.update(*(x.flatten(), x.flatten().sin()) if self.is_pair else [x])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.update(self.of_training, batch[0])
        self.log("train", self.of_training, on_step=False, on_epoch=True)
        return self.net(batch[0]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch[0].max() < self.num_first / 3:
            self.update(self.of_validation, batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val", self.of_validation.compute().sum())
        self.of_validation.reset()

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.arange(9.0).unsqueeze(1) / 3), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(devices: int, path: Path, kind: type[Metric], num_first: int) -> None:
    trainer = small_trainer(devices, max_epochs=2, precision="64-true", num_sanity_val_steps=0)
    trainer.fit(Measures(kind, num_first))
    if trainer.is_global_zero:
        found = {name: trainer.callback_metrics[name].sum().item() for name in ("train", "val")}
        path.write_text(json.dumps(found))
    close_process_group()


# With 4 samples, one rank alone has a batch.
@pytest.mark.parametrize("num_first", [9, 4])
@pytest.mark.parametrize("kind", [MaxMetric, SpearmanCorrCoef, CatMetric])
def test_ranks_whose_metrics_differ_in_type_agree(
    kind: type[Metric], num_first: int, tmp_path: Path
) -> None:
    found = []
    for devices in (1, 2):
        path = tmp_path / f"{devices}.json"
        in_processes(devices, fit, devices, path, kind, num_first)
        found.append(json.loads(path.read_text()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
