from typing import Any

import pytorch_lightning as pl
from torchmetrics import Metric

from harness.data.batches import Shares
from harness.data.sharing import leaves
from harness.errors import UserError
from harness.exact.global_batches import check_same_batches, shares_of
from harness.upstream.logged_values import (
    average_no_more,
    average_over_processes,
    count_exactly,
    logged_means,
    start_anew,
)


def evaluated(trainer: pl.Trainer) -> Any:
    """The loaders of the evaluation that runs."""
    return trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders


def shares_running(trainer: pl.Trainer, dataloader_idx: int = 0) -> Shares | None:
    """What is known of the loader whose batches are running."""
    loaders = evaluated(trainer) if trainer.evaluating else trainer.train_dataloader
    if (only := shares_of(loaders)) is not None:  # one loader, without a look at collections
        return only
    found = leaves(loaders)
    return shares_of(found[dataloader_idx]) if dataloader_idx < len(found) else None


def is_filler(trainer: pl.Trainer, batch_idx: int = 0, dataloader_idx: int = 0) -> bool:
    """Whether the batch is there only because every process must take part in every step."""
    sharing = shares_running(trainer, dataloader_idx)
    return sharing is not None and sharing.is_filler(batch_idx)


class ExactEvaluation(pl.Callback):
    """Make what several processes log equal to what one process would.

    Three things stand between. Lightning averages the number of samples over the processes as a
    whole number, which is wrong wherever they hold unequal numbers: here it becomes a fraction.
    A mean that a validation or test step logs without ``sync_dist=True`` would be that of the
    first process alone: here all are averaged. And a process without a sample of its own takes
    part in every collective with another's: metrics forget what that has added.
    """

    def __init__(self) -> None:
        # Not a dict: the hash of a metric changes with its state.
        self.kept: list[tuple[Metric, dict[str, Any]]] | None = None
        self.averaged: list[Any] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse metrics that keep all samples where some processes have none: they would hang."""
        sharing = [shares_of(loader) for loader in leaves(evaluated(trainer))]
        if not any(one is not None and one.starves for one in sharing):
            return
        for metric in metrics_of(pl_module):
            if any(isinstance(state, list) for state in metric.metric_state.values()):
                raise UserError(
                    f"{type(metric).__name__} keeps samples, and {trainer.world_size} processes "
                    "cannot share so few of them.\nUse trainer.devices=1."
                )

    on_test_start = on_validation_start

    def on_train_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Before a filler, remember the states of all metrics and logged values."""
        if is_filler(trainer, batch_idx, dataloader_idx):
            self.kept = [
                (metric, {name: _copy(value) for name, value in metric.metric_state.items()})
                for metric in [*metrics_of(pl_module), *logged_means(trainer)]
            ]

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count exactly, and take out what a filler has added."""
        if self.kept is not None:
            known = {id(metric) for metric, _ in self.kept}
            for metric, state in self.kept:
                for name, value in state.items():
                    setattr(metric, name, value)
            for logged in logged_means(trainer):
                if id(logged) not in known:  # logged for the first time
                    start_anew(logged)
            self.kept = None
        count_exactly(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count exactly over all processes."""
        self.on_train_batch_end(trainer)
        numbers = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        num_batches = numbers[dataloader_idx]
        sharing = shares_running(trainer, dataloader_idx)
        if sharing is not None and sharing.num_batches is not None:
            num_batches = min(num_batches, sharing.num_batches)
        if batch_idx + 1 == num_batches:
            self.averaged += average_over_processes(trainer)
            if sharing is not None and trainer.world_size > 1:
                check_same_batches(trainer, [sharing])

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the logged values as the module has declared them."""
        average_no_more(self.averaged)
        self.averaged = []

    on_test_epoch_end = on_validation_epoch_end


def metrics_of(pl_module: pl.LightningModule) -> list[Metric]:
    """The metrics that are part of a module."""
    return [module for module in pl_module.modules() if isinstance(module, Metric)]


def _copy(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()
