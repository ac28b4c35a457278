"""A loader that a hook asks for is the user's own: whole, on every rank, and it moves nothing.

Nor does a module hold anything of the run: it can be copied.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.resume_sweep import sweep
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Data(pl.LightningDataModule):
    """31 samples in batches of 8."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        inputs = torch.randn(31, 4, generator=torch.Generator().manual_seed(0)).double()
        self.samples = TensorDataset(inputs)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, 8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, 8)


class Asks(pl.LightningModule):
    """Passes over loaders in hooks; its loss depends on the order of their batches."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer("prototype", torch.zeros(4))

    def look(self, split: str) -> None:
        """Let the prototype follow the means of a loader's batches."""
        loader = getattr(self.trainer.datamodule, f"{split}_dataloader")()
        assert len(loader) == 4
        sizes = []
        for (inputs,) in loader:
            self.prototype.lerp_(inputs.mean(0).to(self.prototype), 0.5)
            sizes.append(len(inputs))
        assert sizes == [8, 8, 8, 7]

    def on_train_epoch_start(self) -> None:
        self.look("train")
        next(iter(self.trainer.datamodule.val_dataloader()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0].to(self.prototype)) - self.prototype).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.look("train")
        self.log("val/prototype", self.prototype.sum())

    def on_train_epoch_end(self) -> None:
        self.look("val")
        self.look("train")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(devices: int, path: Path) -> None:
    pl.seed_everything(1)
    module = Asks()
    trainer = small_trainer(devices, max_epochs=3, precision="64-true")
    trainer.fit(module, Data())
    if trainer.is_global_zero:
        torch.save(module.state_dict() | trainer.callback_metrics, path)


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_read_what_one_reads(tmp_path: Path) -> None:
    for devices in (1, 2):
        in_processes(devices, train, devices, tmp_path / f"{devices}.pt")
    one, two = (torch.load(tmp_path / f"{devices}.pt") for devices in (1, 2))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of few workers
def test_a_resumed_run_reads_them_again(tmp_path: Path) -> None:
    words = [f"model._target_={__name__}.Asks", f"data._target_={__name__}.Data"]
    words += ["objective=val/loss", "callbacks.learning_rate=null", "trainer.max_epochs=2"]
    found = dict(sweep([*words, "model.num_classes=1", "model.net=null"], tmp_path / "runs"))
    assert len(found) == 8
    assert {step: wrong for step, wrong in found.items() if wrong} == {}


class OwnLoaders(Asks):
    """Has its loaders itself, and a list that ranks gather."""

    train_dataloader, val_dataloader = Data.train_dataloader, Data.val_dataloader

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.outputs = Data().samples, list[Tensor]()

    def on_train_epoch_start(self) -> None:
        assert sum(len(batch[0]) for batch in self.train_dataloader()) == 31

    def look(self, split: str) -> None:
        """Look at nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(batch[0])


class Copies(pl.Callback):
    """Copies the module in several ways, and lets a copy train and log by itself."""

    num = 0

    def copy(self, trainer: pl.Trainer, module: Any) -> None:
        pickled = pickle.dumps(module)
        assert len(pickled) < 10_000
        for copied in (copy.deepcopy(module), pickle.loads(pickled)):
            assert copied._trainer is None
            assert copied.log.args == (copied,)
            assert len(copied.train_dataloader()) == 4
            copied.net.weight.data.zero_()
            self.num += 1
        assert module.net.weight.any()

    on_train_start = on_train_epoch_end = on_validation_epoch_end = copy


def copy_in_callbacks() -> None:
    copies = Copies()
    trainer = small_trainer(2, copies, max_epochs=2, precision="64-true", num_sanity_val_steps=0)
    trainer.fit(OwnLoaders())
    assert copies.num == 10


def test_a_module_with_loaders_of_its_own_is_copied_without_the_run() -> None:
    in_processes(2, copy_in_callbacks)
