"""``self.log`` whose values are those of all samples, whoever had them."""

import logging
from collections.abc import Iterable
from functools import partial
from numbers import Real
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from harness.processes.agreement import gather
from harness.upstream import logged_values
from harness.upstream.logged_values import LoggedValue, in_hook, joined

log = logging.getLogger(__name__)
# The parameters of LightningModule.log behind its value, for what is given by position.
NAMES: tuple[str, ...] = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
NAMES += ("enable_graph", "sync_dist", "sync_dist_group", "add_dataloader_idx", "batch_size")
PASSED: tuple[str, ...] = ("name", "prog_bar", "logger", "on_step", "on_epoch")  # to Lightning
PASSED += ("add_dataloader_idx", "rank_zero_only")
FLOATS = (torch.float32, torch.float64)


class SelfLog:
    """Stand in for ``log`` of a module, and hand a ``LoggedValue`` to Lightning for each number.

    A value counts by the samples of this process's batch, or by the author's ``batch_size``. What
    an epoch's steps have logged is combined once, at its end; a row of a training step where
    somebody reads it: over processes, and over the batches that are accumulated. In between
    nothing is sent, so a step of an evaluation waits for nobody. What some processes alone have
    logged in a step is logged by the others as well, with weight 0.

    Args:
        trainer: of the run.
        module: whose ``log`` this is, as an attribute.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.trainer, self.module = trainer, module
        self.values: dict[str, LoggedValue] = {}
        self.metrics: dict[str, tuple[dict[str, Any], Metric]] = {}
        self.order: dict[str, None] = {}  # of both, as first logged
        self.batch: Any = None  # that runs
        self.num_samples: int | None = None  # of it in this process; 0 in a filler
        self.batch_idx = self.dataloader_idx = self.num_steps = 0
        self.num_seen = 0  # samples of the running loader
        self.is_training = self.is_split = False  # a training batch runs; it is a share
        self.told: set[str] = set()

    def __reduce__(self) -> Any:
        # A copy of the module has Lightning's own method.
        return partial, (type(self.module).log, self.module)

    def begin_batch(self, batch: Any, num_samples: int | None, *place: int) -> None:
        """Know what the values count that are logged from here on."""
        self.batch, self.num_samples = batch, num_samples
        self.batch_idx, self.dataloader_idx = place
        self.num_seen = (self.num_seen if self.batch_idx else 0) + (num_samples or 0)
        self.is_training = bool(self.trainer.training)
        self.is_split = self.trainer.world_size * int(self.trainer.accumulate_grad_batches) > 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, name: str, value: Any, *args: Any, **given: Any) -> None:
        """Log a value, as ``LightningModule.log`` does."""
        given |= zip(NAMES, args, strict=False)
        hook = logged_values.running_hook(self.module)
        op = given.get("reduce_fx", "mean")
        op = (op if isinstance(op, str) else getattr(op, "__name__", "")).lower()
        op = "mean" if op == "avg" else op
        is_one = isinstance(value, Tensor) and value.numel() == 1
        is_number = is_one or isinstance(value, Real)
        if hook is None or op not in logged_values.START or not is_number:
            if isinstance(value, Metric):
                self._note_metric(name, value, hook, given)
            type(self.module).log(self.module, name, value, **given)  # or what Lightning refuses
            return
        loader = self.dataloader_idx if given.get("add_dataloader_idx", True) else None
        logged = self.values.get(key := f"{hook}.{name}.{loader}")
        if logged is None or logged.op != op:
            how = {k: given.get(k) for k in (*PASSED, "sync_dist") if k in given}
            logged = self.made(key, how | {"name": name, "fx": hook, "op": op})
        on_step, on_epoch = given.get("on_step"), given.get("on_epoch")
        is_of_epoch = on_epoch or (on_epoch is None and not self.is_training)
        if self.num_samples == 0:
            value, weight = logged.zero + torch.nan, 0
        else:
            value = self._as_sum(value, logged)
            is_weighted = op == "mean" and (is_of_epoch or self.is_split)
            weight = self._weight(given.get("batch_size")) if is_weighted else 1
            if is_of_epoch and (isinstance(weight, Tensor) or weight):
                logged.update(value, weight)
        if on_step is not False:
            self._note_step(logged, value, weight, on_step)
        logged.is_pending |= is_of_epoch
        self._hand_over(logged)

    def made(self, key: str, how: dict[str, Any]) -> LoggedValue:
        """Begin to accumulate a value."""
        # No smaller than single precision, as Lightning has it.
        dtype = torch.get_default_dtype()
        dtype = dtype if dtype in FLOATS else torch.float32
        zero = torch.zeros((), dtype=dtype, device=self.module.device)
        self.order[key] = None
        logged = self.values[key] = LoggedValue(how, zero)
        logged.is_of_training = bool(self.trainer.training)
        logged.passed = {name: how[name] for name in PASSED if name in how}
        logged.passed["metric_attribute"] = how["name"]
        return logged

    def _as_sum(self, value: Any, logged: LoggedValue) -> Tensor:
        if not isinstance(value, Tensor):
            return torch.full_like(logged.zero, value)
        value = value.detach().reshape(())
        is_as_sum = value.dtype in FLOATS and value.device == logged.zero.device
        return value if is_as_sum else value.to(logged.zero)  # type: ignore[no-any-return]

    def _weight(self, given: Any) -> Any:
        if given is not None:
            return given.detach() if isinstance(given, Tensor) else given
        if self.num_samples is None:
            self.num_samples = 1 if self.batch is None else extract_batch_size(self.batch)
        return self.num_samples

    def _note_step(self, logged: LoggedValue, value: Tensor, weight: Any, wanted: Any) -> None:
        if self.is_training:
            logged.note_step(value.clone(), weight, (self.num_steps, self.batch_idx))
        elif wanted and self.trainer.world_size > 1:
            self._tell_once(
                logged.how["name"],
                "%s is logged with on_step=True in an evaluation: under several processes it has "
                "the epoch's value and no rows of single steps.",
            )
        elif wanted:
            logged.note_step(value.clone(), weight, (0, 0))

    def hand_over(self, logged: LoggedValue) -> None:
        """Have Lightning know a value, as its hook would."""
        with in_hook(self.module, logged.how["fx"]):
            self._hand_over(logged)

    def _hand_over(self, logged: LoggedValue) -> None:
        logged.is_logged = True
        type(self.module).log(self.module, value=logged, batch_size=1, **logged.passed)

    def _note_metric(
        self, name: str, metric: Metric, hook: str | None, given: dict[str, Any]
    ) -> None:
        how = {k: v for k, v in given.items() if isinstance(v, (bool, str))}
        self.order[key := f"{hook}.{name}"] = None
        self.metrics[key] = (how | {"name": name, "fx": hook}, metric)
        wanted = given.get("on_step", self.is_training or None)
        if wanted and self.is_split and not metric.dist_sync_on_step:
            self._tell_once(
                name,
                "%s, a metric, is logged at steps: there it counts a part of the batch alone, "
                "one process's and the last that is accumulated. Over an epoch it counts all.",
            )

    def _tell_once(self, name: str, sentence: str) -> None:
        if name not in self.told and self.trainer.is_global_zero:
            log.warning(sentence, name)
        self.told.add(name)

    def end_batch(self) -> None:
        """After a batch and its hooks: let a row that is read have the whole batch's values."""
        trainer, self.batch, self.num_samples = self.trainer, None, None
        if not self.is_training:
            return
        self.is_training = False
        every = int(trainer.accumulate_grad_batches)
        is_step = (self.batch_idx + 1) % every == 0 or trainer.is_last_batch
        if self.is_split and is_step and self._is_read():
            self._complete_rows()
        self.num_steps += is_step

    def _is_read(self) -> bool:
        trainer: Any = self.trainer
        plateau = any(
            c.reduce_on_plateau and c.interval == "step" for c in trainer.lr_scheduler_configs
        )
        is_row = logged_values.row_is_due(trainer) or trainer.fast_dev_run
        return plateau or trainer.is_last_batch or is_row

    def _complete_rows(self) -> None:
        mine = {k: v for k, v in self.values.items() if v.parts and not is_own(v)}
        parts = [part for value in mine.values() for part in value.parts]
        numbers = iter(as_floats(number for part in parts for number in part))
        pairs = {}
        for key, value in mine.items():
            of_one = [(next(numbers), next(numbers)) for _ in value.parts]
            of_one = [(v * w if value.op == "mean" else v, w) for w, v in of_one if w]
            pairs[key] = (value.place[0], *joined(value.op, of_one))
        everyone = gather(self.trainer, pairs)
        self._log_what_others_have(everyone)
        for key in named(everyone):
            value, found = self.values[key], [one[key] for one in everyone if key in one]
            latest = max(step for step, *_ in found)
            total, weight = joined(value.op, [(t, w) for step, t, w in found if step == latest])
            row = logged_values.last_value(value)
            if weight and row is not None:
                row.fill_(quotient(value.op, total, weight))
            value.parts = []

    def combine(self) -> None:
        """Let the values of an epoch's steps, or of a loader's, be those of all processes."""
        if self.trainer.world_size == 1:
            return
        everyone = gather(self.trainer, self._pending())
        self._log_what_others_have(everyone)
        for key, value in ((key, self.values[key]) for key in named(everyone)):
            is_of_first = everyone[0].get(key, (0, 0))[1] == self.num_seen
            if is_of_first and not any(key in one for one in everyone[1:]):
                self._tell_once(
                    value.how["name"],
                    "%s was logged for all batches of process 0 and none of the others, and counts "
                    "them alone. Log it in every process, or with rank_zero_only=True.",
                )
            pairs = [one[key] for one in everyone if key in one]
            value.settle(quotient(value.op, *joined(value.op, pairs)))

    def combine_at_end(self, refuse: Any) -> None:
        """Look at what the hooks at an epoch's end have logged, which must be the same everywhere.

        Args:
            refuse: is called with the name, hook, values by process, and whether they are added.
        """
        if self.trainer.world_size == 1:
            return
        mine = {
            key: (self.values[key].how, quotient(self.values[key].op, *pair))
            for key, pair in self._pending().items()
        }
        everyone = gather(self.trainer, mine)
        for key in named(everyone):
            how = next(one[key][0] for one in everyone if key in one)
            values = [one[key][1] if key in one else None for one in everyone]
            is_combined = how.get("sync_dist") and how["op"] != "mean" and None not in values
            refuse(how["name"], how["fx"], values, is_combined and how["op"])
            if key in self.values:
                pairs = [(value, 1.0) for value in values if value is not None]
                total, _ = joined(how["op"], pairs)
                self.values[key].settle(total if is_combined else mine[key][1])

    def _pending(self) -> dict[str, tuple[float, float]]:
        mine = {
            key: value
            for key, value in self.values.items()
            if value.is_pending and not is_own(value)
            if value.is_of_training == bool(self.trainer.training)
        }
        numbers = iter(as_floats(n for v in mine.values() for n in (v.total, v.weight)))
        return {key: (next(numbers), next(numbers)) for key in mine}

    def _log_what_others_have(self, everyone: list[dict[str, Any]]) -> None:
        lacking = [key for key in named(everyone) if any(key not in one for one in everyone)]
        if not lacking:
            return
        known = {key: self.values[key].how for key in lacking if key in self.values}
        others = gather(self.trainer, known)
        for key in lacking:
            if key not in self.values or not self.values[key].is_logged:
                how = next(one[key] for one in others if key in one)
                self.log_nothing(key, how)

    def log_nothing(self, key: str, how: dict[str, Any]) -> None:
        """Have Lightning know a value that this process has not logged."""
        logged = self.values[key] if key in self.values else self.made(key, how)
        has_row = self.trainer.training and how.get("on_step") is not False
        if has_row and logged_values.last_value(logged) is None:
            logged.note_step(torch.full_like(logged.zero, torch.nan), 0, (self.num_steps, -1))
        self.hand_over(logged)


def is_own(value: LoggedValue) -> bool:
    """Whether a value is that of one process, as its author says."""
    return bool(value.how.get("rank_zero_only"))


def quotient(op: str, total: float, weight: float) -> float:
    """The value of a total and a weight."""
    if op != "mean":
        return total
    return total / weight if weight else torch.nan


def named(everyone: Iterable[dict[str, Any]]) -> list[str]:
    """All keys that some process has, in one order."""
    return list(dict.fromkeys(key for one in everyone for key in one))


def as_floats(numbers: Iterable[Any]) -> list[float]:
    """Numbers, some of them scalars on a device, for which it is waited once."""
    numbers = list(numbers)
    tensors = [n.detach().reshape(()).double() for n in numbers if isinstance(n, Tensor)]
    known = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(known) if isinstance(n, Tensor) else float(n) for n in numbers]
