"""What several processes log and evaluate is what one process would; or a sentence says why not."""

import copy
import os
import pickle
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from harness.errors import UserError
from harness.exact import self_log
from harness.exact.evaluation import ExactEvaluation
from harness.run.train import close_process_group
from tests.strategy_runs import in_processes
from tests.workers.trainer import small_trainer


class Logs(pl.LightningModule):
    """A step for each of 5 batches, of 4 samples but for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.register_buffer("written", torch.zeros(()))
        self.metric = MeanMetric()

    def log(self, name: str, value: Any, **how: Any) -> None:
        """An author's own, as some have it."""
        super().log(f"own/{name}", value, **how)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.written.fill_(self.global_rank + 1)
        return self.net(batch[0]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0] + 100 * self.current_epoch
        self.log("mean", x.mean(), on_step=True, on_epoch=True)
        self.metric.update(x)
        self.log("metric", self.metric)
        if 8 in batch[0]:  # in one process alone
            self.log("rare", x.mean())
        self.log("most", x.max(), reduce_fx="max")
        self.log("written", self.written)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(18.0).unsqueeze(1)), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Reduces(Logs):
    """Averages over processes by itself, where one of them has a batch more."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if dist.is_initialized():
            all_reduce(mean := batch[0].mean())
            self.log("mean", mean)


class OneAlone(Logs):
    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.log("time", 1.0)


class OfFirst(Logs):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.global_rank == 0:
            self.log("first", batch[0].mean())


def fit(module: pl.LightningModule, devices: int, num_epochs: int = 1) -> pl.Trainer:
    trainer = small_trainer(devices, max_epochs=num_epochs, num_sanity_val_steps=0)
    trainer.fit(module)
    return trainer


def compare(devices: int) -> None:
    trainer = fit(Logs(), devices, num_epochs=2)
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert found.pop("own/mean_epoch") == found["own/mean"]
    found.pop("own/mean_step", None)  # of one process's last batch
    assert found.pop("own/mean") == found.pop("own/metric") == 108.5
    assert found == {"own/rare": 109.5, "own/most": 117.0, "own/written": 1.0}
    close_process_group()


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_an_epoch_has_the_value_of_all_samples(devices: int) -> None:
    """Whatever an author makes of ``log``, logs now and then, or leaves in a buffer."""
    in_processes(devices, compare, devices)


def refused(kind: type[Logs], said: str, ranks: tuple[int, ...]) -> None:
    with pytest.raises(UserError if int(os.environ["LOCAL_RANK"]) in ranks else Exception) as error:
        fit(kind(), 2)
    assert int(os.environ["LOCAL_RANK"]) not in ranks or said in str(error.value)
    os._exit(0)  # the others are left by one, as by a process that ends with an error


def test_what_processes_would_wait_for_is_refused() -> None:
    in_processes(2, refused, Reduces, "some of them have one batch less", (0,))
    in_processes(2, refused, OneAlone, "is each process's own (1, none)", (0, 1))


def tells() -> None:
    told = list[str]()
    self_log.log.warning = lambda text, *args: told.append(text % args)  # type: ignore[method-assign]
    fit(OfFirst(), 2)
    is_told = any("first was logged for all batches of process 0" in line for line in told)
    assert is_told == (os.environ["LOCAL_RANK"] == "0")
    assert not any("rare" in line for line in told)
    close_process_group()


def test_a_value_of_the_first_process_alone_is_told() -> None:
    """And not one that only some batches have, which are all of one process."""
    in_processes(2, tells)


def test_a_copy_of_the_module_has_the_log_of_lightning() -> None:
    module = Logs()
    fit_log = ExactEvaluation()
    fit_log.setup(pl.Trainer(accelerator="cpu", logger=False), module, "fit")
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert made.log.args[0] is made
