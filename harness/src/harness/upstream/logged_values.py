"""Hands Lightning a metric of ours in place of each number that ``self.log`` is given.

Lightning keeps numbers in a result collection that cannot be reached from outside, and adds a
collective to each training step where a row shall be of all processes. A metric stays ours: its
value can be set when it is read, and its sums can be saved in the middle of an epoch. Lightning
reads a step's value from a private attribute. Next: ``exact/self_log.py`` decides what the values
are; ``final_values.py`` says when they are read; ``checkpoints/logged.py`` saves them.

Seen in Lightning 2.6 and torchmetrics 1.6 to 1.9; ``harness/tests/exact/test_self_log.py`` compares
the values.
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
Pair = tuple[float, float]  # total, of a mean's values times their weights, and weight; 0: no value


class LoggedValue(Metric):
    """Accumulate what a hook logs under one name, over an epoch and over the shares of a step.

    `how` are the arguments of ``self.log``, with its hook as ``fx`` and ``reduce_fx`` as a text;
    `zero` is a scalar of the type and on the device of the sums.
    """

    def __init__(self, how: dict[str, Any], zero: Tensor, is_training: bool) -> None:
        super().__init__()
        self.how, self.op, self.zero, self.is_training = how, how["reduce_fx"], zero, is_training
        # torchmetrics' wrappers of these would combine the processes, which ``SelfLog`` does.
        del vars(self)["update"], vars(self)["compute"]
        self.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # saves the checks of nn.Module, at every step

    @property
    def device(self) -> torch.device:
        """Return the device of the sums."""
        return self.zero.device

    def to(self, *_: Any, **__: Any) -> Any:
        """Return itself: the sums are made on the module's device; Lightning asks at every step."""
        return self

    def reset(self) -> None:
        """Forget the epoch; Lightning calls it at the epoch's end."""
        self.total: Tensor = self.zero + START[self.op]
        self.weight: Number = 0
        self.computed: Tensor | None = None  # what Lightning has read
        self.step = self.batch_idx = -1  # the last step in which it was logged, and its last batch
        self.shares: list[tuple[Tensor, Number]] = []  # that step's values and weights
        self._forward_cache: Any = None  # that step's value, which Lightning reads
        self.is_logged = False  # in this epoch
        self.is_pending = False  # processes are not combined yet

    def update(self, value: Tensor, weight: Number) -> None:
        """Add a value to the epoch's."""
        if isinstance(weight, Tensor):
            value = value.where(weight > 0, 0.0)  # a mean over nothing is NaN
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
        """Set the running step's value, of which a batch, or a further part of one, has a share."""
        if step != self.step:
            self.shares = []
        elif batch_idx == self.batch_idx and not is_further:
            self.shares.pop()  # logged twice in a batch: the last one counts
        self.step, self.batch_idx, self._forward_cache = step, batch_idx, value
        self.shares.append((value, weight))

    def begin_row(self) -> None:
        """Give Lightning a NaN for now, until the values of all processes are combined."""
        if self._forward_cache is None:
            self._forward_cache = self.zero + torch.nan

    def complete_step(self, pairs: list[Pair]) -> None:
        """Set the value of all shares of the last step."""
        total, weight = merge(self.op, pairs)
        if weight:
            number = reduced(self.op, total, weight)
            self._forward_cache = torch.tensor(number, dtype=self.zero.dtype)
        self.shares = []

    def complete_epoch(self, pairs: list[Pair]) -> None:
        """Set the value of all processes, also where Lightning has read this one's."""
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
        """Return what a checkpoint keeps."""
        names = ("how", "total", "weight", "step", "batch_idx", "shares", "is_pending")
        return {name: getattr(self, name) for name in names} | {"row": self._forward_cache}

    def restore(self, states: list[dict[str, Any]], takes_all: bool) -> None:
        """Take what one or several processes have counted, or only the last row."""
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
    """Merge what several processes or batches have counted."""
    totals = [total for total, weight in pairs if weight]
    if op in ("max", "min") and totals:
        # Python's own would lose a NaN.
        total = float(getattr(torch.tensor(totals, dtype=torch.float64), f"a{op}")())
    else:
        total = sum(totals)
    return total, sum(weight for _, weight in pairs)


def reduced(op: str, total: float, weight: float) -> float:
    """Return the value of a total and its weight."""
    if op != "mean":
        return total
    return total / weight if weight else math.nan


def running_hook(module: pl.LightningModule) -> str | None:
    """Return the name of the hook in which something is logged."""
    return module._current_fx_name


@contextmanager
def in_hook(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Let something be logged as if a hook ran."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def detached_copy(value: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors of a tree, so that what is saved does not change any more."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: detached_copy(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [detached_copy(item, device) for item in value]
    return value


def named_metrics(module: nn.Module) -> dict[str, Metric]:
    """Return the metrics that are part of a module, by name."""
    parts = dict(module.named_modules())
    for part in parts.values():
        if isinstance(part, MetricCollection):
            part.items()  # up to torchmetrics 1.7 the first of a compute group counts for all
    return {name: part for name, part in parts.items() if isinstance(part, Metric)}


def metric_counts(metric: Metric) -> dict[str, Any]:
    """Return what a metric has counted."""
    return {
        "state": detached_copy(metric.metric_state),
        "num_updates": metric.update_count,
        "last": detached_copy(metric._forward_cache),
    }


def restore_metric(metric: Metric, saved: dict[str, Any], device: torch.device) -> None:
    """Let a metric have counted what a saved one had; its class may reset more than its counts."""
    Metric.reset(metric)
    for name, value in detached_copy(saved["state"], device).items():
        setattr(metric, name, value)
    metric._update_count = saved["num_updates"]
    metric._forward_cache = detached_copy(saved["last"], device)
