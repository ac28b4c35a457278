from typing import Any

import pytorch_lightning as pl
from torchmetrics import Metric

from project.data.batches import EvaluationBatchSampler
from project.errors import UserError


def evaluation_sampler(trainer: pl.Trainer) -> EvaluationBatchSampler | None:
    """The sampler of the loader that is being validated or tested, if it is ours."""
    loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    sampler = getattr(loaders, "batch_sampler", None)
    return sampler if isinstance(sampler, EvaluationBatchSampler) else None


class ExactEvaluation(pl.Callback):
    """Make what several processes log equal to what one process would.

    Two things stand between. Lightning averages the number of samples over the processes as a
    whole number, which is wrong wherever they hold unequal numbers: here it becomes a fraction.
    And a process without a sample of its own must take part in every collective with another's:
    here its contribution is taken out again.

    The logged values are in ``trainer._results``, which is private to Lightning (seen in 2.6);
    ``tests/callbacks/test_exact_evaluation.py`` fails where that changes.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count samples exactly in the means over a training epoch."""
        count_exactly(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be exact."""
        refuse_few_samples(trainer, pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse what cannot be exact."""
        refuse_few_samples(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Count exactly, and take out what a filler has added."""
        take_out_filler(trainer, pl_module)
        count_exactly(trainer)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Count exactly, and take out what a filler has added."""
        take_out_filler(trainer, pl_module)
        count_exactly(trainer)


def count_exactly(trainer: pl.Trainer) -> None:
    """Let the processes' numbers of samples be averaged as fractions."""
    if trainer.world_size == 1 or trainer._results is None:
        return
    for logged in trainer._results.values():
        if logged.is_tensor and logged.meta.is_mean_reduction:
            logged.cumulated_batch_size = logged.cumulated_batch_size.float()


def take_out_filler(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Forget the only batch of a process that has no sample of its own."""
    sampler = evaluation_sampler(trainer)
    if sampler is None or not sampler.is_filler:
        return
    for metric in metrics_of(pl_module):
        metric.reset()
    for logged in (trainer._results or {}).values():
        logged.reset()
        logged.has_reset = False  # otherwise Lightning leaves it out of the collectives


def refuse_few_samples(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Refuse metrics that keep all samples where some processes have none: they would hang."""
    sampler = evaluation_sampler(trainer)
    if sampler is None or sampler.num_samples >= sampler.num_ranks:
        return
    for metric in metrics_of(pl_module):
        if any(isinstance(state, list) for state in metric.metric_state.values()):
            raise UserError(
                f"{type(metric).__name__} cannot be computed for {sampler.num_samples} samples by "
                f"{sampler.num_ranks} processes.\n"
                f"Use trainer.devices={sampler.num_samples} or fewer."
            )


def metrics_of(pl_module: pl.LightningModule) -> list[Metric]:
    """The metrics that are part of a module."""
    return [module for module in pl_module.modules() if isinstance(module, Metric)]
