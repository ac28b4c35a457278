"""A replacement of ``self.log`` whose values count the samples of all ranks.

In: the values that a module logs in a hook. Each number becomes a ``LoggedValue``, which Lightning
treats as a torchmetrics metric. Out: values of steps and epochs, over all ranks and accumulated
batches. Logging calls no collective: ``RankCombiner`` calls ``end_batch``, ``combine`` and
``of_all_processes`` before Lightning reads the values. Next: ``checkpoints/value_states.py`` saves
the values of an epoch that has not ended.
"""

import inspect
import logging
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from harness.compat import logged_values
from harness.compat.final_values import floats, row_is_due
from harness.compat.logged_values import LoggedValue, Number, Pair, merge
from harness.distributed.gather import gather
from harness.sharded import full_tensor
from harness.strategies.parallel_forward import running_chunk

log = logging.getLogger(__name__)
# Parameters of ``LightningModule.log`` after ``value``, for arguments passed by position.
POSITIONAL = [*inspect.signature(pl.LightningModule.log).parameters][3:]
PASSED = {"prog_bar", "logger", "on_step", "on_epoch", "sync_dist"}
PASSED |= {"add_dataloader_idx", "rank_zero_only"}
FLOATS = (torch.float32, torch.float64)


class LoggedMetric(NamedTuple):
    """A torchmetrics metric that was logged, and the arguments of ``log``."""

    how: dict[str, Any]
    metric: Metric


class SelfLog:
    """Replace ``log`` of a module.

    A mean weights each value by the samples of the local batch, or by ``batch_size`` of ``log``. An
    epoch is combined once, at its end; a training step only if a logger or scheduler reads it. If
    some ranks have not logged a value, they log the value then, with weight 0.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.logged: dict[str, LoggedValue | LoggedMetric] = {}  # in the order of logging
        self.batch: Any = None  # the running batch
        self.num_samples: int | None = None  # in this batch; 0 if padding, None if not counted
        self.batch_idx = self.dataloader_idx = 0
        self.num_seen = 0  # samples of the running loader
        self.step: int | None = None  # in the epoch, while a training batch runs; else None
        self.is_split = False  # whether several ranks or accumulated batches make a step
        # By key: the arguments of ``log`` for the values of this loader that Lightning has.
        self.known: dict[str, Any] = {}
        self.warned: set[str] = set()

    def __reduce__(self) -> Any:
        return partial, (type(self.module).log, self.module)  # a copy gets Lightning's own method

    def begin_batch(
        self, batch: Any, num_samples: int | None, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Note the batch of the values that are logged next."""
        self.batch, self.num_samples = batch, num_samples
        self.known = self.known if batch_idx else {}
        self.batch_idx, self.dataloader_idx = batch_idx, dataloader_idx
        self.num_seen = (self.num_seen if batch_idx else 0) + (num_samples or 0)
        num_batches = int(self.trainer.accumulate_grad_batches)
        self.step = batch_idx // num_batches if self.trainer.training else None
        num_parts = self.trainer.world_size * self.trainer.num_devices * num_batches
        self.is_split = num_parts > 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, name: str, value: Any, *args: Any, **how: Any) -> None:
        """Log a value, as ``LightningModule.log`` does."""
        how |= zip(POSITIONAL, args, strict=False)
        hook, op = logged_values.running_hook(self.module), operation(how)
        is_number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if hook is None or op not in logged_values.START or not is_number:
            if isinstance(value, Metric) and self._note_metric(name, value, hook, how):
                return
            type(self.module).log(self.module, name, value, **how)  # which may raise
            return
        loader = self.dataloader_idx if how.get("add_dataloader_idx", True) else None
        key = f"{hook}.{name}.{loader}"
        logged = self.logged.get(key)
        passed = {"name": name, "reduce_fx": op} | {k: how[k] for k in how if k in PASSED}
        passed["fx"] = hook
        if not isinstance(logged, LoggedValue):
            logged = self.new_value(key, passed)
        logged.how = passed
        on_step, on_epoch = how.get("on_step"), how.get("on_epoch")
        is_of_epoch = on_epoch or (on_epoch is None and self.step is None)
        weight: Number = 1
        part, _, num_rows = running_chunk()  # a split call logs once for each part
        if self.num_samples == 0:
            value, weight = logged.zero + torch.nan, 0
        else:
            value = self._as_sum(value, logged)
            if op == "mean" and (is_of_epoch or self.is_split):
                weight = self._weight(how.get("batch_size", num_rows or None))
        if is_of_epoch:
            logged.update(value, weight)
            logged.is_pending = True
        if self.step is not None and on_step is not False:
            logged.note_step(value.clone(), weight, self.step, self.batch_idx, bool(part))
        elif on_step and self.trainer.world_size == 1:  # else each rank evaluates other batches
            logged.note_step(value.clone(), weight, 0, 0)
        is_known = self._is_known(key, passed)
        if self.step is not None:
            # Once Lightning has read the epoch's value, it keeps it until ``log`` is called again.
            is_known &= logged.is_logged and logged.computed is None
        if not is_known or (on_step and self.step is None):
            self.pass_to_lightning(logged)

    def _is_known(self, key: str, how: dict[str, Any]) -> bool:
        """Return whether Lightning has got the value in an earlier batch of this loader.

        It reads the value from the same object then. Its ``log`` is not called again, because that
        may take longer than a step.
        """
        is_known: bool = self.batch is not None and self.known.get(key) == how
        self.known[key] = how
        return is_known

    def new_value(self, key: str, how: dict[str, Any]) -> LoggedValue:
        """Return a new ``LoggedValue``, and keep it under ``key``."""
        # Single precision or more, as in Lightning.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        zero = torch.zeros((), dtype=dtype, device=self.module.device)
        logged = self.logged[key] = LoggedValue(how, zero, bool(self.trainer.training))
        return logged

    def _as_sum(self, value: Any, logged: LoggedValue) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full_like(logged.zero, value)
        if value.device.type == "cpu" and logged.device.type != "cpu":
            return torch.full_like(logged.zero, value.item())  # ``to`` would synchronise
        value = full_tensor(value.detach()).reshape(())  # such as the gradient norm under fsdp
        is_as_sum = value.dtype in FLOATS and value.device == logged.device
        return value if is_as_sum else value.to(logged.zero)  # type: ignore[no-any-return]

    def _weight(self, given: Any) -> Number:
        if given is not None:
            return given.detach().reshape(()) if isinstance(given, Tensor) else given
        if self.num_samples is None:
            self.num_samples = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.num_samples

    def pass_to_lightning(self, logged: LoggedValue) -> None:
        """Pass a value to Lightning, as if its hook had logged it now."""
        logged.is_logged = True
        passed = {name: value for name, value in logged.how.items() if name != "fx"}
        # With ``metric_attribute`` Lightning does not search the module for the metric.
        passed |= {"metric_attribute": passed["name"], "batch_size": 1}
        with logged_values.in_hook(self.module, logged.how["fx"]):
            type(self.module).log(self.module, value=logged, **passed)

    def _note_metric(
        self, name: str, metric: Metric, hook: str | None, given: dict[str, Any]
    ) -> bool:
        """Keep a logged metric, and return whether Lightning has it already."""
        how = {k: v for k, v in given.items() if isinstance(v, (bool, str))}
        key = f"{hook}.{name}"
        self.logged[key] = LoggedMetric(how | {"name": name, "fx": hook}, metric)
        on_step = given.get("on_step")
        is_at_steps = self.step is not None if on_step is None else on_step
        if is_at_steps and self.is_split and not metric.dist_sync_on_step:
            self._warn_once(
                name,
                "The metric %s is logged at steps. A step's value counts only the last accumulated "
                "batch on rank 0.\nUse on_step=False, on_epoch=True: an epoch's value counts all "
                "samples.",
            )
        return not is_at_steps and self._is_known(key, how | {"metric": id(metric)})

    def _warn_once(self, name: str, message: str) -> None:
        if name not in self.warned and self.trainer.is_global_zero:
            log.warning(message, name)
        self.warned.add(name)

    def end_batch(self) -> None:
        """Combine a training step's values after its last batch, if they are read at this step.

        A logger or a scheduler reads them. At the end of an epoch they are combined in any case.
        """
        trainer: Any = self.trainer
        is_training = self.step is not None
        self.batch = self.num_samples = self.step = None
        if not (is_training and self.is_split):
            return
        is_row = row_is_due(trainer) or trainer.fast_dev_run
        is_read = is_row or any(  # a scheduler reads the values
            c.reduce_on_plateau and c.interval == "step" for c in trainer.lr_scheduler_configs
        )
        is_step = (self.batch_idx + 1) % int(trainer.accumulate_grad_batches) == 0
        if trainer.is_last_batch or (is_step and is_read):
            self._complete_step_values()

    def _complete_step_values(self) -> None:
        values = {key: value for key, value in self._values().items() if value.shares}
        shares = [share for value in values.values() for share in value.shares]
        numbers = iter(floats([number for share in shares for number in share]))
        step_and_pair = {}
        for key, value in values.items():
            pairs = [(next(numbers), next(numbers)) for _ in value.shares]
            if value.op == "mean":
                pairs = [(number * weight, weight) for number, weight in pairs]
            step_and_pair[key] = (value.step, merge(value.op, pairs))
        for value, by_rank in self._gather(step_and_pair):
            # Leave out ranks that logged the value last in an earlier step.
            latest = max(step for step, _ in filter(None, by_rank))
            pairs = [pair for step, pair in filter(None, by_rank) if step == latest]
            value.complete_step(pairs)

    def of_all_processes(self) -> list[tuple[LoggedValue, list[Pair | None]]]:
        """Return each value that is not combined yet, with the total and weight of each rank."""
        if self.trainer.world_size == 1:
            return []
        values = {
            key: value
            for key, value in self._values().items()
            if value.is_pending and value.is_training == bool(self.trainer.training)
        }
        sums = [number for value in values.values() for number in (value.total, value.weight)]
        numbers = iter(floats(sums))
        return self._gather({key: (next(numbers), next(numbers)) for key in values})

    def combine(self) -> None:
        """Combine the values of an epoch's steps, or of a loader's, over all ranks."""
        for value, by_rank in self.of_all_processes():
            value.complete_epoch([pair for pair in by_rank if pair])
            if by_rank[0] and by_rank[0][1] == self.num_seen and not any(by_rank[1:]):
                self._warn_once(
                    value.how["name"],
                    "%s was logged for all batches of rank 0 and for none of the other ranks, so "
                    "its value counts only the samples of rank 0. Log the value on every rank, "
                    "or with rank_zero_only=True.",
                )

    def _values(self) -> dict[str, LoggedValue]:
        """Return the logged numbers to combine: all without ``rank_zero_only``."""
        return {
            key: value
            for key, value in self.logged.items()
            if isinstance(value, LoggedValue) and not value.how.get("rank_zero_only")
        }

    def _gather(self, numbers: dict[str, Any]) -> list[tuple[LoggedValue, list[Any]]]:
        """Return each value with each rank's numbers; log values that only other ranks have."""
        values = self._values()
        by_rank = gather(self.trainer, {k: (values[k].how, pair) for k, pair in numbers.items()})
        result = []
        for key, how in {key: how for rank in by_rank for key, (how, _) in rank.items()}.items():
            value = values.get(key)
            if value is None or not value.is_logged:
                value = value or self.new_value(key, how)
                if self.trainer.training and how.get("on_step") is not False:
                    value.begin_row()
                self.pass_to_lightning(value)
            result.append((value, [rank[key][1] if key in rank else None for rank in by_rank]))
        return result


def operation(how: dict[str, Any]) -> str:
    """Return the name of the reduction in the argument ``reduce_fx``, a string or a function."""
    op = how.get("reduce_fx", "mean")
    op = (op if isinstance(op, str) else getattr(op, "__name__", "")).lower()
    return "mean" if op == "avg" else op
