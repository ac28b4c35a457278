from typing import Any

import pytorch_lightning as pl
from torchmetrics import Metric

from harness.data.batches import EvaluationBatchSampler, GlobalBatchSampler
from harness.errors import UserError
from harness.upstream.logged_values import (
    average_no_more,
    average_over_processes,
    count_exactly,
    logged_means,
    start_anew,
)


def sampler_of(
    trainer: pl.Trainer, dataloader_idx: int = 0
) -> GlobalBatchSampler | EvaluationBatchSampler | None:
    """The sampler of the loader whose batches are running, if it is ours."""
    if trainer.testing:
        loaders = trainer.test_dataloaders
    elif trainer.evaluating:
        loaders = trainer.val_dataloaders
    else:
        loaders = trainer.train_dataloader
    if isinstance(loaders, (list, tuple)):
        loaders = loaders[dataloader_idx]
    sampler = getattr(loaders, "batch_sampler", None)
    is_ours = isinstance(sampler, (GlobalBatchSampler, EvaluationBatchSampler))
    return sampler if is_ours else None


def is_filler(trainer: pl.Trainer, batch_idx: int = 0, dataloader_idx: int = 0) -> bool:
    """Whether the batch is there only because every process must take part in every step."""
    sampler = sampler_of(trainer, dataloader_idx)
    return sampler is not None and sampler.is_filler(batch_idx)


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
        sampler = sampler_of(trainer)
        if sampler is None or sampler.num_samples >= sampler.num_ranks:
            return
        for metric in metrics_of(pl_module):
            if any(isinstance(state, list) for state in metric.metric_state.values()):
                raise UserError(
                    f"{type(metric).__name__} keeps samples, and {sampler.num_ranks} processes "
                    f"cannot share {sampler.num_samples} of them.\nUse trainer.devices=1."
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
        num_batches = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        if batch_idx + 1 == num_batches[dataloader_idx]:
            self.averaged += average_over_processes(trainer)

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
