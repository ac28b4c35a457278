"""DDP broadcasts rank 0's buffers before steps that may read them, and before evaluations."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.parity.gathering import Gathering
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


class Frozen(nn.BatchNorm1d):
    """A subclass that always uses its running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        running = (self.running_mean, self.running_var)
        self.running_mean.add_(x.detach().mean(0))
        return torch.batch_norm(x, None, None, *running, False, 0.1, 1e-5, False)


class Normalises(pl.LightningModule):
    """Store BatchNorm's mean, as each step and each evaluation sees it."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        extra: list[nn.Module] = {
            "none": [],
            "writes": [Centres()],
            "subclass": [Frozen(3, affine=False)],
            "evaluation mode": [nn.BatchNorm1d(3).eval()],
        }[layer]
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), *extra, nn.Linear(3, 1))
        self.layer, self.samples = layer, torch.randn(12, 2)
        self.means: dict[str, list[Any]] = {"train": [], "val": []}

    def forward(self, x: Tensor) -> Tensor:
        self.means["train" if self.training else "val"].append(self.net[1].running_mean.tolist())
        return self.net(x)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.layer == "evaluation mode":
            self.net[2].eval()

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


def fit(layer: str, folder: Path, always: bool) -> None:
    if always:
        Gathering._reads_buffers = lambda _: True  # type: ignore[method-assign]
    trainer = small_trainer(2, max_epochs=2, limit_val_batches=2)
    trainer.fit(module := Normalises(layer))
    torch.save(
        (module.means, module.state_dict()), folder / f"{layer}-{always}-{trainer.global_rank}"
    )
    close_process_group()


def results(layer: str, folder: Path, always: bool = False) -> list[Any]:
    in_processes(2, fit, layer, folder, always)
    return [torch.load(folder / f"{layer}-{always}-{rank}") for rank in range(2)]


def test_batch_norm_in_training_needs_no_broadcast_and_each_evaluation_has_that_of_rank_0(
    tmp_path: Path,
) -> None:
    (means, weights), (means_of_1, _) = results("none", tmp_path)
    # The first step of each of two epochs broadcasts; the other two do not.
    same = [mine == other for mine, other in zip(means["train"], means_of_1["train"], strict=True)]
    assert same == [True, False, False] * 2
    assert means["val"][0] == means_of_1["val"][0]
    (_, always), _ = results("none", tmp_path, always=True)
    for name, value in weights.items():
        assert torch.equal(value, always[name]), name


@pytest.mark.parametrize("layer", ["writes", "subclass", "evaluation mode"])
def test_buffers_that_a_step_may_read_are_broadcast_before_each_step(
    layer: str, tmp_path: Path
) -> None:
    (means, _), (means_of_1, _) = results(layer, tmp_path)
    assert means["train"] == means_of_1["train"]
