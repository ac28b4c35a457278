"""The metric that Lightning gets in place of each number that is logged.

Lightning keeps logged numbers in a private collection, and adds a collective to each training step
to combine a step's value over the ranks. A metric object needs neither: the library can set the
value just before Lightning reads it, and can save the sums within an epoch. Lightning reads a
step's value from a private attribute of the metric.

Next: ``parity/self_log.py`` computes the values, ``final_values.py`` decides when they are read,
and ``checkpoints/value_states.py`` saves them. Seen in Lightning 2.6 and torchmetrics 1.6 to 1.9;
``harness/tests/parity/test_self_log.py`` compares the values.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}
Number = Tensor | float
# Total and weight. For a mean, the total is the sum of value * weight. Weight 0 means no value.
Pair = tuple[float, float]


class LoggedValue(Metric):
    """Accumulate the values that a hook logs under one name, over a step and over an epoch.

    Args:
        how: the arguments of ``self.log``, with the hook as ``fx``, and ``reduce_fx`` as a string.
        zero: a scalar with the dtype and device of the sums.
        is_training: whether the value is logged in training.
    """

    def __init__(self, how: dict[str, Any], zero: Tensor, is_training: bool) -> None:
        super().__init__()
        self.how, self.op, self.zero, self.is_training = how, how["reduce_fx"], zero, is_training
        # torchmetrics' wrappers of update and compute would combine the ranks, as SelfLog does.
        del vars(self)["update"], vars(self)["compute"]
        self.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # skips the checks of nn.Module, which are slow

    @property
    def device(self) -> torch.device:
        """Return the device of the sums."""
        return self.zero.device

    def to(self, *_: Any, **__: Any) -> Any:
        """Return itself. Lightning calls this at every step; the sums are on the right device."""
        return self

    def reset(self) -> None:
        """Reset all sums. Lightning calls this at the end of an epoch."""
        self.total: Tensor = self.zero + START[self.op]
        self.weight: Number = 0
        self.computed: Tensor | None = None  # the value that Lightning has read
        self.step = self.batch_idx = -1  # the step and batch that logged the value last
        self.shares: list[tuple[Tensor, Number]] = []  # (value, weight) by local batch of the step
        self._forward_cache: Any = None  # the value of ``step``, which Lightning reads
        self.is_logged = False  # whether Lightning has the value in this epoch
        self.is_pending = False  # whether the epoch's value must still be combined over the ranks

    def update(self, value: Tensor, weight: Number) -> None:
        """Add a value to the sums of the epoch."""
        if isinstance(weight, Tensor):
            value = value.where(weight > 0, 0.0)  # a mean over nothing may be NaN
        elif not weight:
            return
        if self.op in ("max", "min"):
            self.total = (torch.maximum if self.op == "max" else torch.minimum)(self.total, value)
        else:
            self.total = self.total + (value * weight if self.op == "mean" else value)
        self.weight = self.weight + weight

    def note_step(
        self, value: Tensor, weight: Number, step: int, batch_idx: int, is_further: bool = False
    ) -> None:
        """Set the running step's value, and keep the value and weight of a local batch.

        Args:
            value: the value of the local batch.
            weight: its weight in the step's mean.
            step: the index of the step in the epoch.
            batch_idx: the index of the batch in the epoch.
            is_further: whether the value is from a further chunk of the batch, in a split call.
        """
        if step != self.step:
            self.shares = []
        elif batch_idx == self.batch_idx and not is_further:
            self.shares.pop()  # the value was logged twice in a batch: keep the last one
        self.step, self.batch_idx, self._forward_cache = step, batch_idx, value
        self.shares.append((value, weight))

    def begin_row(self) -> None:
        """Set a missing step value to NaN, until ``complete_step`` sets the value of all ranks."""
        if self._forward_cache is None:
            self._forward_cache = self.zero + torch.nan

    def complete_step(self, pairs: list[Pair]) -> None:
        """Set the last step's value, from the totals and weights of all ranks."""
        total, weight = merge(self.op, pairs)
        if weight:
            number = reduced(self.op, total, weight)
            self._forward_cache = torch.tensor(number, dtype=self.zero.dtype)
        self.shares = []

    def complete_epoch(self, pairs: list[Pair]) -> None:
        """Set the epoch's value over all ranks, even if Lightning has read this rank's value."""
        value = reduced(self.op, *merge(self.op, pairs))
        self.total, self.weight = torch.tensor(value, dtype=self.total.dtype), 1
        self.is_pending = False
        if self.computed is not None:
            self.computed.copy_(self.total)

    def compute(self) -> Tensor:
        """Return the epoch's value."""
        self.computed = self.total / self.weight if self.op == "mean" else self.total.clone()
        return self.computed

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        names = ("how", "total", "weight", "step", "batch_idx", "shares", "is_pending")
        return {name: getattr(self, name) for name in names} | {"row": self._forward_cache}

    def restore(self, states: list[dict[str, Any]], takes_all: bool) -> None:
        """Restore the state of several ranks; without ``takes_all``, only the last step's value."""
        self._forward_cache = states[0]["row"]
        self.is_pending = any(state["is_pending"] for state in states)
        self.step, self.batch_idx = max((state["step"], state["batch_idx"]) for state in states)
        if not takes_all:
            return
        self.total, self.weight = states[0]["total"], states[0]["weight"]
        if len(states) > 1:
            pairs = [(float(state["total"]), float(state["weight"])) for state in states]
            total, self.weight = merge(self.op, pairs)
            if self.weight:
                self.total = torch.full_like(self.total, total)
        latest = [state["shares"] for state in states if state["step"] == self.step]
        self.shares = [tuple(share) for shares in latest for share in shares]


def merge(op: str, pairs: list[Pair]) -> Pair:
    """Merge totals and weights of several ranks or batches."""
    totals = [total for total, weight in pairs if weight]
    if op in ("max", "min") and totals:
        # Python's max and min would lose a NaN.
        total = float(getattr(torch.tensor(totals, dtype=torch.float64), f"a{op}")())
    else:
        total = sum(totals)
    return total, sum(weight for _, weight in pairs)


def reduced(op: str, total: float, weight: float) -> float:
    """Return the value of a total and its weight; NaN for a mean of weight 0."""
    if op != "mean":
        return total
    return total / weight if weight else math.nan


def running_hook(module: pl.LightningModule) -> str | None:
    """Return the name of the running hook, as Lightning records it for ``log``."""
    return module._current_fx_name


@contextmanager
def in_hook(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Let Lightning attribute ``self.log`` calls in this context to a hook."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def detached_copy(value: Any, device: torch.device | str = "cpu") -> Any:
    """Copy all tensors in nested dicts, lists and tuples to a device; detach them."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: detached_copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached_copy(item, device) for item in value]
    return value


def named_metrics(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics among a module's submodules, by name."""
    submodules = dict(module.named_modules())
    for child in submodules.values():
        if isinstance(child, MetricCollection):
            child.items()  # sets shared states, up to torchmetrics 1.7
    return {name: child for name, child in submodules.items() if isinstance(child, Metric)}


def metric_counts(metric: Metric) -> dict[str, Any]:
    """Return a copy of a metric's state, number of updates and last value."""
    return {
        "state": detached_copy(metric.metric_state),
        "num_updates": metric.update_count,
        "last": detached_copy(metric._forward_cache),
    }


def restore_metric(metric: Metric, saved: dict[str, Any], device: torch.device) -> None:
    """Restore a result of ``metric_counts``.

    It calls ``Metric.reset``, because ``reset`` of the metric's class may change more.
    """
    Metric.reset(metric)
    for name, value in detached_copy(saved["state"], device).items():
        setattr(metric, name, value)
    metric._update_count = saved["num_updates"]
    metric._forward_cache = detached_copy(saved["last"], device)
