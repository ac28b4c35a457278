"""Combine logged values, copy them to the host, and report them to callbacks.

In: Lightning's calls of its logger connector, at the end of a batch, loader, epoch or evaluation.
Out: final values on the CPU, for Lightning's readers and for ``on_values`` of callbacks.

Lightning has no hook for the moment when values are final. Lightning copies each value to the host
separately, and repeats a step's value in later rows. A **row** is the set of values that loggers
get in one call, from a training step or an evaluation. At each moment this file first calls
``parity/combine_values.py``, which combines the ranks. Then it copies and reports the values. Next:
loggers, checkpoints, early stopping and plateau schedules read them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor

from harness.compat.hooks import around_hooks
from harness.compat.logged_values import LoggedValue
from harness.errors import UserError

Read = Callable[[pl.Trainer], None]
# Methods of the connector that Lightning calls and that ``FinalValues`` overrides.
READS = (
    "on_batch_end epoch_end_reached on_epoch_end "
    "update_train_step_metrics update_eval_epoch_metrics log_eval_end_metrics"
)


class FinalValues(_LoggerConnector):
    """Lightning's logger connector, which also calls the functions of ``before_reading``."""

    before: dict[str, list[Read]]  # functions by moment: see ``before_reading``
    fresh: dict[str, Tensor]  # values of the running evaluation

    def on_batch_end(self) -> None:
        """Combine the values of a batch, and copy them to the host if Lightning reads them now."""
        self.call("batch")
        if self.trainer.evaluating or self.ends_row():
            self.copy_to_host(on_step=True)
        super().on_batch_end()

    def epoch_end_reached(self) -> None:
        """Combine the values of an epoch's steps, or of a loader of an evaluation."""
        self.call("loader")
        super().epoch_end_reached()

    def end_train_epoch(self) -> None:
        """Report the values of a training epoch and its hooks, and of steps since the last row."""
        self.call("hooks")
        self.copy_to_host(on_step=True)
        self.copy_to_host(on_step=False)
        values = self.read(on_step=True)["callback"] | self.read(on_step=False)["callback"]
        self.report("train_epoch", values)

    def on_epoch_end(self) -> None:
        """Combine the values that hooks at the end of an evaluation have logged."""
        if not self.trainer.training:
            self.call("hooks")
        self.call("epoch")
        self.copy_to_host(on_step=False)
        super().on_epoch_end()

    def update_train_step_metrics(self) -> None:
        """Report the row of a training step, and clear the values for later rows."""
        if not self.ends_row():
            return
        metrics = self.metrics
        if values := metrics["callback"] | metrics["log"]:
            self.report("train_step", values)
        self.log_metrics(metrics["log"])
        results: Any = self.trainer._results
        for metric in results.result_metrics:
            metric._forward_cache = None
            if isinstance(metric.value, LoggedValue):
                metric.value._forward_cache = None

    def update_eval_epoch_metrics(self) -> Any:
        """Keep the values of a loader, or of the hooks at an evaluation's end."""
        self.copy_to_host(on_step=False)
        self.fresh |= self.metrics["callback"]
        return super().update_eval_epoch_metrics()

    def log_eval_end_metrics(self, metrics: Any) -> None:
        """Report the values of an evaluation."""
        fresh, self.fresh = self.fresh, {}
        if not self.trainer.sanity_checking:
            self.report("test" if self.trainer.testing else "validate", fresh)
        super().log_eval_end_metrics(metrics)

    @property
    def metrics(self) -> Any:
        """Return the values by reader. The progress bar gets tensors, without synchronising."""
        return self.read(self._first_loop_iter is not None)

    def read(self, on_step: bool) -> Any:
        """Return the values of the step or epoch, for callbacks, loggers and the progress bar."""
        results: Any = self.trainer._results
        by_reader: Any = {"callback": {}, "log": {}, "pbar": {}}
        for _, metric in results.valid_items():
            value = value_of(results, metric, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked = results._forked_name(metric, on_step)
            is_shown = metric.meta.prog_bar or (metric.meta.logger and self.trainer.loggers)
            if value.numel() != 1 and is_shown:
                raise UserError(
                    f"self.log({name!r}, ...) got {value.numel()} values, but logs only one.\n"
                    "Log each value under its own name, for example in on_validation_epoch_end: "
                    'for i, value in enumerate(metric.compute()): self.log(f"val/class_{i}", value)'
                )
            if metric.meta.logger:
                by_reader["log"][forked] = value
            if metric.meta.prog_bar:
                by_reader["pbar"][forked] = value
            if results.training or (metric.meta.on_epoch and not on_step):
                by_reader["callback"] |= {name: value, forked: value}
        return by_reader

    @property
    def progress_bar_metrics(self) -> Any:
        """Return the values of the progress bar as Python numbers, which synchronises."""
        shown: Any = super().progress_bar_metrics
        shown.update(zip(shown, floats([*shown.values()]), strict=True))
        return shown

    def ends_row(self) -> bool:
        """Return whether this batch completes a training step whose values loggers get."""
        trainer: Any = self.trainer
        if not trainer.training:
            return False
        is_automatic = trainer.lightning_module.automatic_optimization
        if is_automatic and trainer.fit_loop._should_accumulate():
            return False
        return row_is_due(trainer) or bool(trainer.fast_dev_run)

    def call(self, moment: str) -> None:
        """Call the functions that ``before_reading`` added for a moment, the latest first."""
        for function in self.before[moment]:
            function(self.trainer)

    def copy_to_host(self, on_step: bool) -> None:
        """Copy the values that are final now to the CPU, with one transfer for each dtype."""
        results: Any = self.trainer._results
        cache = "_forward_cache" if on_step else "_computed"
        by_type = defaultdict[torch.dtype, list[tuple[Any, Tensor]]](list)
        for _, metric in results.valid_items():
            value = value_of(results, metric, on_step)
            if isinstance(value, Tensor) and value.numel() == 1 and not is_on_host(value):
                by_type[value.dtype].append((metric, value.reshape(())))
        for values in by_type.values():
            copies = torch.stack([value for _, value in values]).cpu()  # synchronises
            for (metric, _), copy in zip(values, copies, strict=True):
                setattr(metric, cache, copy)

    def report(self, stage: str, values: dict[str, Tensor]) -> None:
        """Call ``on_values`` of the callbacks that have it, on every rank."""
        numbers = {name: value.item() for name, value in values.items() if value.numel() == 1}
        trainer: Any = self.trainer
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for callback in trainer.callbacks:
            if hasattr(callback, "on_values"):
                callback.on_values(trainer, stage, trainer.current_epoch, step, dict(numbers))


def before_reading(trainer: pl.Trainer, **functions: Read) -> None:
    """Let functions run before Lightning reads logged values.

    Args:
        trainer: the trainer whose connector calls the functions.
        functions: by moment. ``batch`` is the end of a batch. ``loader`` comes after an epoch's
            steps, or a loader of an evaluation. ``hooks`` comes after the module's epoch-end hook,
            and ``epoch`` after ``hooks``. The function that was added last is called first.
    """
    connector: Any = trainer._logger_connector
    if not hasattr(connector, "before"):
        around_hooks(trainer, [trainer.lightning_module], ["on_train_epoch_end"], ending_epoch)
    if type(connector) is _LoggerConnector:
        connector.__class__ = FinalValues
        vars(connector).update(before=defaultdict(list), fresh={})
    for moment, function in functions.items():
        connector.before[moment].insert(0, function)


def read_as_before(trainer: pl.Trainer) -> None:
    """Restore Lightning's own connector."""
    trainer._logger_connector.__class__ = _LoggerConnector


@contextmanager
def ending_epoch(trainer: pl.Trainer) -> Iterator[None]:
    """Report the epoch's values after the module's ``on_train_epoch_end``, before checkpoints."""
    yield
    if isinstance(connector := trainer._logger_connector, FinalValues):
        connector.end_train_epoch()


def value_of(results: Any, metric: Any, on_step: bool) -> Tensor | None:
    """Return Lightning's value of a step or an epoch, or None."""
    if on_step and isinstance(metric.value, LoggedValue):
        metric._forward_cache = metric.value._forward_cache  # the value of all ranks
    value: Tensor | None = results._get_cache(metric, on_step)
    return value


def is_on_host(value: Tensor) -> bool:
    """Return whether a value can be read without synchronising."""
    return value.device.type == "cpu"


def row_is_due(trainer: pl.Trainer) -> bool:
    """Return whether the loggers get a row for the running training step."""
    return trainer._logger_connector.should_update_logs


def floats(values: list[Any]) -> list[float]:
    """Return values as floats; all tensors of a dtype and device are copied at once."""
    result = list(values)
    by_type = defaultdict[Any, list[int]](list)
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            by_type[value.dtype, value.device].append(i)
    for indices in by_type.values():
        scalars = torch.stack([values[i].detach().reshape(()) for i in indices])
        for i, number in zip(indices, scalars.tolist(), strict=True):  # synchronises
            result[i] = number
    return [float(value) for value in result]
