"""Rows and epochs are those of one process, however many hold the samples, and what it draws."""

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from harness import num_ranks
from tests.conftest import ci, slow, train_command
from tests.strategy_runs import write_conf


class Logs(pl.LightningModule):
    """Logs as users do who train in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.register_buffer("one", torch.ones(()))  # that DDP would send in each forward
        self.metric, self.outputs = MeanMetric(), list[Tensor]()

    def log(self, name: str, value: Any, **how: Any) -> None:
        """Log under another name, as some users do."""
        super().log(f"own/{name}", value, **how)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x) * self.one
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("synced", loss, sync_dist=True)
        self.log_dict({"largest": x.max()}, reduce_fx="max")
        self.log("smallest", x.min(), reduce_fx=torch.min)
        self.log("samples", float(len(x)), reduce_fx="sum")
        self.log("constant", 0.1)
        self.log("epoch_only", loss, on_step=False, on_epoch=True)
        if self.global_step % 4 == 0:  # between two rows
            self.log("rare", loss)
        if self.global_step % 10 == 0:  # once in each epoch
            self.log("first", loss, on_step=True, on_epoch=True)
        is_right, known = (logits.argmax(-1) == y).double(), y != 2
        if num := int(known.sum()):
            self.log("known", is_right[known].mean(), batch_size=num, on_step=True, on_epoch=True)
        if num or self.trainer.world_size > 1:
            own = is_right[known].mean() if num else loss * torch.nan
            self.log("known, synced", own, batch_size=num, sync_dist=True)
        if (x[:, 0] > 1.9).any():  # perhaps in one process alone
            self.log("large", (x[:, 0] > 1.9).double().sum(), reduce_fx="sum")
            self.log("largest with NaN", x[:, 0].max() * torch.nan, reduce_fx="max")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("after the step", batch[0].mean(), on_step=True, on_epoch=True)

    def on_validation_epoch_start(self) -> None:
        self.shift = torch.rand(())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch[0] + self.shift + torch.rand_like(batch[0]), batch[1]
        loss = F.cross_entropy(self(x), y)
        self.log("val/loss", loss)
        self.metric.update(loss, weight=len(x))
        self.log("val/metric", self.metric)
        if batch_idx == self.global_rank == 0:
            self.log("val/rare", loss)
        self.log("val/most", x.max(), reduce_fx="max")
        self.outputs.append(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.log("val/computed", self.metric.compute())  # a library gathers, beside the lists
        self.log("val/all", torch.cat(self.outputs).mean())
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watches(pl.Callback):
    """A callback has a ``log`` of its own, which Lightning lends it."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.log("of a callback", arguments[3][0].mean(), on_step=True, on_epoch=True)

    def on_validation_batch_end(self, *arguments: Any) -> None:
        self.log("val/of a callback", arguments[3][0].mean())


class Numbers(pl.LightningDataModule):
    """65 samples in batches of 7: uneven shares, and at the end two samples."""

    def setup(self, stage: str) -> None:
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(65, 8, generator=random, dtype=torch.float64)
        self.samples = TensorDataset(inputs, torch.randint(0, 3, (65,), generator=random))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=7, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        num_workers = int(num_ranks(self.trainer) > 1)  # to start one, torch draws a number
        return DataLoader(self.samples, batch_size=7, num_workers=num_workers)


def train(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The rows of a run."""
    groups = {"model": f"_target_: {__name__}.Logs\n", "data": f"_target_: {__name__}.Numbers\n"}
    settings = "trainer.max_epochs=2 trainer.log_every_n_steps=2 trainer.precision=64-true"
    chosen = [*write_conf(folder, **groups), *settings.split(), "mode=min", "test=false"]
    chosen += [f"+callbacks.watches._target_={__name__}.Watches"]
    run_dir = train_command(folder, *chosen, "objective=own/val/loss", *overrides)
    with (run_dir / "metrics.csv").open() as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    rows = train(tmp_path_factory.mktemp("one"))
    steps = [row for row in rows if "own/plain" in row]
    assert len({row["own/plain"] for row in steps}) == len(steps) > 9
    assert {row["own/samples"] for row in steps} == {7.0, 2.0}
    names = ("first_step", "known_step", "large", "known, synced")
    assert {f"own/{name}" for name in names} <= {name for row in steps for name in row}
    assert sum("own/first_step" in row for row in rows) == 2  # once an epoch, and not repeated
    assert {"own/val/metric", "own/val/rare", "own/val/all", "own/val/of a callback"} <= {*rows[-1]}
    return rows


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=ddp", "trainer.devices=3"),  # one has nothing of the last two samples
        *ci((("strategy=ddp", "trainer.devices=2", "trainer.accumulate_grad_batches=2"),)),
        *slow(
            (("strategy=dp", "trainer.devices=2"),),
            (("strategy=ddp2", "trainer.devices=2", "trainer.accumulate_grad_batches=2"),),
        ),
    ],
    ids=" ".join,
)
def test_rows_are_those_of_one_process(
    overrides: tuple[str, ...], one_process: list[dict[str, float]], tmp_path: Path
) -> None:
    rows = train(tmp_path, *overrides)
    assert [row.keys() for row in rows] == [row.keys() for row in one_process]
    for row, expected in zip(rows, one_process, strict=True):
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-12, nan_ok=True)
