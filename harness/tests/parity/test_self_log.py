"""A run warns of values that ranks would wait for, or lose, as users log or gather them."""

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from harness.errors import UserError
from harness.parity import gathering, self_log
from harness.parity.combine_values import RankCombiner
from harness.training.attachments import Attachments
from harness.training.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Module(pl.LightningModule):
    """Has five batches in each loader: of two processes one has a batch more."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", batch[0].mean(), on_step=True, on_epoch=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(18.0).unsqueeze(1)), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Reduces(Module):
    """Averages over processes by itself."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        all_reduce(batch[0].mean())


class OneAlone(Module):
    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("time", 1.0)


class OfFirst(Module):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("first", batch[0].mean())
            if batch_idx == 0:
                self.log("rare", batch[0].mean())


def fit(module: pl.LightningModule) -> None:
    small_trainer(2, max_epochs=1, num_sanity_val_steps=0).fit(module)


def refused(kind: Callable[[], Module], said: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserError if int(os.environ["LOCAL_RANK"]) in ranks else Exception) as error:
        fit(kind())
    assert int(os.environ["LOCAL_RANK"]) not in ranks or said in str(error.value)
    os._exit(0)  # the others are left by one, as by a process that ends with an error


def test_what_processes_would_wait_for_is_refused() -> None:
    in_processes(2, refused, Reduces, "some ranks have one batch less", (0,))
    in_processes(2, refused, OneAlone, "differs between ranks (1, none)", (0, 1))


def tells() -> None:
    told = list[str]()
    self_log.log.warning = lambda text, *args: told.append(text % args)  # type: ignore[method-assign]
    fit(OfFirst())
    is_told = any("first was logged for all batches of rank 0" in line for line in told)
    assert is_told == (os.environ["LOCAL_RANK"] == "0")
    assert not any("rare" in line for line in told)
    close_process_group()


class Pads(Module):
    """Its last batch has one sample: rank 1 computes that of rank 0, with weight 0."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        number = torch.tensor(float(len(batch[0])))
        if self.how == "all_reduce":
            all_reduce(number)
        if self.how == "all_gather":
            number = self.all_gather(number).sum()
        if self.how == "rows":
            self.all_gather(batch[0])
        self.seen += int(number)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        return self.net(batch[0]).mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(9.0).unsqueeze(1)), batch_size=4)


class ByHand(Pads):
    """Calls backward itself, in which DDP reduces gradients."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss) if self.how == "lightning" else loss.backward()
        self.optimizers().step()


def pads(kind: type[Pads], how: str, is_warned: bool) -> None:
    told = list[str]()
    gathering.log.warning = lambda text, *args: told.append(text % args)  # type: ignore[method-assign]
    module = kind(how)
    trainer = small_trainer(2, max_epochs=2, limit_val_batches=0)
    trainer.fit(module)
    is_padded = os.environ["LOCAL_RANK"] == "1"
    assert ["rank 1 has no sample" in line for line in told] == [True] * (is_warned and is_padded)
    assert module.seen == 2 * 10 or not is_warned
    assert trainer.callback_metrics["samples"] == 9
    close_process_group()


def test_a_sample_that_a_rank_computes_as_padding_is_not_silently_counted() -> None:
    """A value that is logged counts it once; a user's own collective counts it once more."""
    for how in ("all_reduce", "all_gather"):
        in_processes(2, pads, Pads, how, True)
    for how in ("lightning", "torch"):
        in_processes(2, pads, ByHand, how, False)
    in_processes(2, refused, partial(Pads, "rows"), "shapes are (1, 1), no sample", (0, 1))


def test_a_value_of_the_first_process_alone_is_told() -> None:
    """And not one that only some batches have, which are all of one process."""
    in_processes(2, tells)


class Each(Module):
    """Logs at each step, and stores what callbacks read after it."""

    def __init__(self) -> None:
        super().__init__()
        self.metric, self.calls, self.read = MeanMetric(), list[str](), list[dict[str, float]]()

    def log(self, name: str, value: Any, **how: Any) -> None:
        self.calls.append(name)  # SelfLog is called in its place, and calls it
        super().log(name, value, **how)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        number = batch[0].mean()
        self.log("step", number)
        self.log("both", number, on_step=True, on_epoch=True)
        self.metric.update(number)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        if batch_idx == 3:
            self.log("late", number)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.read.append({k: float(v) for k, v in self.trainer.callback_metrics.items()})


def reads_each() -> None:
    module = Each()
    small_trainer(1, max_epochs=2, num_sanity_val_steps=0, log_every_n_steps=3).fit(module)
    once = ["step", "both", "metric", "late"]
    assert [name for name in module.calls if name != "mean"] == once * 2
    numbers = [1.5, 5.5, 9.5, 13.5, 16.5] * 2  # of 18 samples in batches of four
    assert [read["step"] for read in module.read] == numbers
    assert [read["both_step"] for read in module.read] == numbers
    assert [read.get("late") for read in module.read] == [None] * 3 + [13.5] * 7
    assert float(module.trainer.callback_metrics["both_epoch"]) == 8.5  # weighted by samples
    assert float(module.trainer.callback_metrics["metric"]) == pytest.approx(sum(numbers) / 10)


def test_lightning_gets_a_value_once_per_epoch_and_every_reader_the_latest() -> None:
    in_processes(1, reads_each)


def test_a_copy_of_the_module_has_the_log_of_lightning() -> None:
    module = Module()
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[Attachments(), RankCombiner()])
    Attachments().setup(trainer, module, "fit")
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert made.log.args[0] is made
