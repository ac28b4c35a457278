"""What ``self.log`` hands to Lightning in place of a number: a metric of ours.

Lightning keeps what it is given in a result collection that cannot be reached from outside; a
metric that is logged stays ours. So its value can be that of all processes and of all accumulated
batches, and its sums can be saved in the middle of an epoch and put back. Lightning tells nobody
when it begins to compute, and reads what a metric's last call gave from a private attribute.

Seen in Lightning 2.6 and torchmetrics 1.6 to 1.9; ``harness/tests/exact/test_self_log.py`` compares
the values.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import Metric, MetricCollection

PRIVATE = {
    "pytorch_lightning:LightningModule()": "_current_fx_name",
    "trainer:_logger_connector": "on_batch_end epoch_end_reached on_epoch_end should_update_logs",
    "torchmetrics:SumMetric()": "_forward_cache _update_count",
    "torch.utils._python_dispatch": "TorchDispatchMode",
}
SEAMS = ("on_batch_end", "epoch_end_reached", "on_epoch_end")
START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}
Number = Tensor | float


class LoggedValue(Metric):
    """Accumulate what a hook logs under one name, over an epoch and over the parts of a step.

    Args:
        how: arguments of ``self.log``, its hook as ``fx``, and ``reduce_fx`` as the text ``op``.
        zero: a scalar of the type and on the device of the sums.
    """

    def __init__(self, how: dict[str, Any], zero: Tensor) -> None:
        super().__init__()
        self.how, self.op = how, str(how["op"])
        self.passed: dict[str, Any] = {}  # on to Lightning
        self.is_of_training = True
        self.zero = zero
        # Without torchmetrics' wrappers of these: ``SelfLog`` combines the processes.
        del vars(self)["update"], vars(self)["compute"]
        self.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # nn.Module looks for parameters and modules

    @property
    def device(self) -> torch.device:
        """Where the sums are."""
        return self.zero.device

    def to(self, device: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Move the sums."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        return self

    def reset(self) -> None:
        """Forget the epoch; Lightning calls it at its end."""
        self.total: Tensor = self.zero + START[self.op]
        self.weight: Number = 0
        self.whole: float | None = None  # the value of all processes, once it is known
        self.computed: Tensor | None = None  # what Lightning was given
        self.parts: list[tuple[Number, Tensor]] = []  # of the last step: weight and value
        self.place = (-1, -1)  # of them: step, and batch in the epoch
        self._forward_cache: Any = None  # the value of the step, which Lightning reads
        self.is_logged = self.is_pending = False  # in this epoch; and not yet combined

    def update(self, value: Tensor, weight: Number) -> None:
        """Add a value to the epoch's."""
        if self.op == "mean":
            added = value * weight
            if isinstance(weight, Tensor):
                added = added.where(weight > 0, 0.0)  # a mean of nothing is NaN
            self.total = self.total + added
        elif self.op == "sum":
            self.total = self.total + value
        else:
            self.total = (torch.maximum if self.op == "max" else torch.minimum)(self.total, value)
        self.weight = self.weight + weight

    def note_step(self, value: Tensor, weight: Number, place: tuple[int, int]) -> None:
        """Let a value be that of the running step, or one of its parts."""
        if place[0] != self.place[0]:
            self.parts = []
        elif place == self.place:
            self.parts.pop()  # logged twice in a batch: the last one counts
        self.place, self._forward_cache = place, value
        self.parts.append((weight, value))

    def settle(self, value: float) -> None:
        """Have the value of all processes, wherever Lightning may have put this one's."""
        self.whole, self.is_pending = value, False
        if self.computed is not None:
            self.computed.fill_(value)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        names = ("how", "total", "weight", "parts", "is_pending")
        kept = {name: getattr(self, name) for name in names}
        return kept | {"row": self._forward_cache, "place": list(self.place)}

    def restore(self, states: list[dict[str, Any]], takes_all: bool) -> None:
        """Have counted what one or several processes had, or nothing but the last row."""
        first, *others = states
        latest = max(state["place"] for state in states)
        self.place, self._forward_cache = tuple(latest), first["row"]
        self.is_pending = any(state["is_pending"] for state in states)
        if takes_all:
            self.total, self.weight = first["total"], first["weight"]
            for other in others:
                weight = other["weight"]  # a mean's total is multiplied already
                if self.op in ("mean", "sum"):
                    self.total = self.total + other["total"]
                    self.weight = self.weight + weight
                else:
                    self.update(other["total"], weight)
            ended = [state for state in states if state["place"][0] == latest[0]]
            self.parts = [tuple(part) for state in ended for part in state["parts"]]

    def compute(self) -> Tensor:
        """The epoch's value."""
        self.computed = self.total / self.weight if self.op == "mean" else self.total.clone()
        if self.whole is not None:
            self.computed.fill_(self.whole)
        return self.computed


def joined(op: str, pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The total and weight of several, each a total and a weight; 0 means that it has no value."""
    pairs = [pair for pair in pairs if pair[1]]
    totals = [total for total, _ in pairs]
    if op in ("max", "min") and totals:
        largest = max(totals) if op == "max" else min(totals)
        total = math.nan if any(map(math.isnan, totals)) else largest
    else:
        total = sum(totals)
    return total, sum(weight for _, weight in pairs)


def running_hook(module: pl.LightningModule) -> str | None:
    """The hook in which something is logged."""
    return module._current_fx_name


@contextmanager
def in_hook(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Let something be logged as if a hook ran."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def before_reading(trainer: pl.Trainer, *functions: Callable[[], None]) -> None:
    """Call functions before Lightning reads what was logged, or forget them if none are given.

    Args:
        trainer: whose Lightning it is.
        functions: called at a batch's end, when the values of an epoch's steps (or of a loader of
            an evaluation) are complete, and after the hooks at an epoch's end.
    """
    connector: Any = trainer._logger_connector
    for name in SEAMS:
        vars(connector).pop(name, None)
    for name, function in zip(SEAMS, functions, strict=False):
        vars(connector)[name] = _before(function, getattr(connector, name))


def _before(function: Callable[[], None], original: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        function()
        original()

    return both


def row_is_due(trainer: pl.Trainer) -> bool:
    """Whether the loggers get a row for the training step that ends."""
    return trainer._logger_connector.should_update_logs


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Call a function before each collective operation of ``torch.distributed``.

    It sees all of them, however they are imported and whoever calls them.
    """

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.refuse = refuse

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operation, then run it."""
        if func.namespace.strip("_").startswith("c10d"):
            self.refuse()
        return func(*args, **(kwargs or {}))


def last_value(metric: Metric) -> Any:
    """What a metric's last call gave."""
    return metric._forward_cache


def copied(value: Any, device: torch.device | str = "cpu") -> Any:
    """Copy the tensors of a tree, so that what is saved does not change any more."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: copied(item, device) for key, item in value.items()}
    return [copied(item, device) for item in value] if isinstance(value, (list, tuple)) else value


def metrics_in(network: Any) -> list[tuple[str, Metric]]:
    """A module's metrics by name; those of a collection brought up to date first."""
    modules = dict(network.named_modules())
    for module in modules.values():
        if isinstance(module, MetricCollection):
            module.items()  # members of a compute group share the first one's counts from now on
    return [(name, module) for name, module in modules.items() if isinstance(module, Metric)]


def metric_counts(metric: Metric) -> dict[str, Any]:
    """What a metric has counted."""
    return {
        "state": copied(metric.metric_state),
        "num_updates": metric.update_count,
        "last": copied(metric._forward_cache),
    }


def restore_metric(metric: Metric, saved: dict[str, Any], device: torch.device) -> None:
    """Let it have counted what another one had."""
    metric.reset()
    for name, value in copied(saved["state"], device).items():
        setattr(metric, name, value)
    metric._update_count = saved["num_updates"]
    metric._forward_cache = copied(saved["last"], device)
