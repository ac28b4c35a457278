"""The moment at which logged values are final: ranks are combined, and the host has the numbers.

In: Lightning's calls of its connector, at the end of a batch, a loader, an epoch and an evaluation.
Out: the same values for Lightning's readers, on the CPU after one copy for all of them, and
``on_values`` of each callback that has it. Lightning tells nobody when values are final, copies
each of them alone, and repeats a step's value in later rows. Next: ``exact/evaluation.py`` combines
the ranks; loggers, checkpoints, early stopping and plateau schedules read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor

from harness.errors import UserError
from harness.upstream.hooks import around_hooks
from harness.upstream.logged_values import LoggedValue

Read = Callable[[pl.Trainer], None]
# What Lightning calls, and this file relies on.
READS = (
    "on_batch_end epoch_end_reached on_epoch_end "
    "update_train_step_metrics update_eval_epoch_metrics log_eval_end_metrics"
)


class FinalValues(_LoggerConnector):
    """Lightning's connector; it calls ``before`` before values are read."""

    before: dict[str, list[Read]]  # by moment: batch, loader, hooks (of an epoch), epoch
    fresh: dict[str, Tensor]  # values of the evaluation that runs

    def on_batch_end(self) -> None:
        """Complete the values of a batch."""
        self.call("batch")
        if self.trainer.evaluating or self.ends_row():
            self.copy_to_host(on_step=True)
        super().on_batch_end()

    def epoch_end_reached(self) -> None:
        """Combine the values of an epoch's steps, or of a loader of an evaluation."""
        self.call("loader")
        super().epoch_end_reached()

    def end_train_epoch(self) -> None:
        """Tell an epoch's values, those of hooks at its end, and of steps since the last row."""
        self.call("hooks")
        self.copy_to_host(on_step=True)
        self.copy_to_host(on_step=False)
        values = self.read(on_step=True)["callback"] | self.read(on_step=False)["callback"]
        self.tell("train_epoch", values)

    def on_epoch_end(self) -> None:
        """Combine what hooks at the end of an evaluation have logged."""
        if not self.trainer.training:
            self.call("hooks")
        self.call("epoch")
        self.copy_to_host(on_step=False)
        super().on_epoch_end()

    def update_train_step_metrics(self) -> None:
        """Tell a row of a training step; what was told is not repeated in later rows."""
        if not self.ends_row():
            return
        metrics = self.metrics
        if values := metrics["callback"] | metrics["log"]:
            self.tell("train_step", values)
        self.log_metrics(metrics["log"])
        results: Any = self.trainer._results
        for one in results.result_metrics:
            one._forward_cache = None
            if isinstance(one.value, LoggedValue):
                one.value._forward_cache = None

    def update_eval_epoch_metrics(self) -> Any:
        """Keep the values of a loader, or of an evaluation's end."""
        self.copy_to_host(on_step=False)
        self.fresh |= self.metrics["callback"]
        return super().update_eval_epoch_metrics()

    def log_eval_end_metrics(self, metrics: Any) -> None:
        """Tell the values of an evaluation."""
        fresh, self.fresh = self.fresh, {}
        if not self.trainer.sanity_checking:
            self.tell("test" if self.trainer.testing else "validate", fresh)
        super().log_eval_end_metrics(metrics)

    @property
    def metrics(self) -> Any:
        """Lightning's, with tensors for the progress bar: numbers would be waited for each step."""
        return self.read(self._first_loop_iter is not None)

    def read(self, on_step: bool) -> Any:
        """Return the values of the step or of the epoch, by their readers."""
        results: Any = self.trainer._results
        found: Any = {"callback": {}, "log": {}, "pbar": {}}
        for _, one in results.valid_items():
            value = value_of(results, one, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked = results._forked_name(one, on_step)
            is_shown = one.meta.prog_bar or (one.meta.logger and self.trainer.loggers)
            if value.numel() != 1 and is_shown:
                raise UserError(
                    f"self.log({name!r}, ...) has {value.numel()} values, and a log takes one.\n"
                    "Log each under a name of its own, in on_validation_epoch_end for example: "
                    'for i, value in enumerate(metric.compute()): self.log(f"val/class_{i}", value)'
                )
            if one.meta.logger:
                found["log"][forked] = value
            if one.meta.prog_bar:
                found["pbar"][forked] = value
            if results.training or (one.meta.on_epoch and not on_step):
                found["callback"] |= {name: value, forked: value}
        return found

    @property
    def progress_bar_metrics(self) -> Any:
        """The numbers for a bar that is drawn now."""
        shown: Any = super().progress_bar_metrics
        shown.update(zip(shown, floats([*shown.values()]), strict=True))
        return shown

    def ends_row(self) -> bool:
        """Return whether the batch that ends completes a training step that the loggers get."""
        trainer: Any = self.trainer
        if not trainer.training:
            return False
        is_part = trainer.lightning_module.automatic_optimization
        if is_part and trainer.fit_loop._should_accumulate():
            return False
        return row_is_due(trainer) or bool(trainer.fast_dev_run)

    def call(self, moment: str) -> None:
        """Call what was given to ``before_reading``, the latest first."""
        for function in self.before[moment]:
            function(self.trainer)

    def copy_to_host(self, on_step: bool) -> None:
        """Let all readers have the values that are final now on the CPU; the device waits once."""
        results: Any = self.trainer._results
        where = "_forward_cache" if on_step else "_computed"
        by_type = defaultdict[torch.dtype, list[tuple[Any, Tensor]]](list)
        for _, one in results.valid_items():
            value = value_of(results, one, on_step)
            if isinstance(value, Tensor) and value.numel() == 1 and not is_on_host(value):
                by_type[value.dtype].append((one, value.reshape(())))
        for values in by_type.values():
            copies = torch.stack([value for _, value in values]).cpu()  # synchronises
            for (one, _), copy in zip(values, copies, strict=True):
                setattr(one, where, copy)

    def tell(self, stage: str, values: dict[str, Tensor]) -> None:
        """Call ``on_values`` of the callbacks that have it, in every process."""
        numbers = {name: value.item() for name, value in values.items() if value.numel() == 1}
        trainer: Any = self.trainer
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        for callback in trainer.callbacks:
            if hasattr(callback, "on_values"):
                callback.on_values(trainer, stage, trainer.current_epoch, step, dict(numbers))


def before_reading(trainer: pl.Trainer, **functions: Read) -> None:
    """Call functions before Lightning reads what was logged.

    Args:
        trainer: whose connector calls them.
        functions: by moment: ``batch`` at a batch's end; ``loader`` when an epoch's steps, or a
            loader of an evaluation, are complete; ``hooks`` behind the module's hook at an epoch's
            end; ``epoch`` when callbacks have read as well. The latest are called first.
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
    """Give a trainer Lightning's own connector back."""
    trainer._logger_connector.__class__ = _LoggerConnector


@contextmanager
def ending_epoch(trainer: pl.Trainer) -> Iterator[None]:
    """Around the module's ``on_train_epoch_end``: checkpoints and early stopping read behind it."""
    yield
    if isinstance(connector := trainer._logger_connector, FinalValues):
        connector.end_train_epoch()


def value_of(results: Any, one: Any, on_step: bool) -> Tensor | None:
    """Return what Lightning has of a step or an epoch; ``None`` if it has nothing."""
    if on_step and isinstance(one.value, LoggedValue):
        one._forward_cache = one.value._forward_cache  # that of all ranks
    value: Tensor | None = results._get_cache(one, on_step)
    return value


def is_on_host(value: Tensor) -> bool:
    """Return whether a value can be read without waiting for a device."""
    return value.device.type == "cpu"


def row_is_due(trainer: pl.Trainer) -> bool:
    """Return whether the loggers get a row for the running training step."""
    return trainer._logger_connector.should_update_logs


def floats(values: list[Any]) -> list[float]:
    """Return numbers of the host and of a device, which is waited for once."""
    result = list(values)
    by_type = defaultdict[Any, list[int]](list)
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            by_type[value.dtype, value.device].append(i)
    for places in by_type.values():
        numbers = torch.stack([values[i].detach().reshape(()) for i in places]).tolist()
        for i, number in zip(places, numbers, strict=True):  # synchronises, above
            result[i] = number
    return [float(value) for value in result]
