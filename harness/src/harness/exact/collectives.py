"""Collective operations of the user's code while a few samples are computed.

In: the run's ranks. As one rank, a collective returns what a process alone gets. Of several ranks
each says first what it is about to do (``meet``); only if all do the same, the operation begins. So
a rank that fails, or takes another way, ends the check in all ranks, and none waits for ever.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor

from harness.exact.snapshot import NotCheckedError
from harness.upstream.one_rank import seen_as_one_rank

FAILED = "the end, because it has failed"
PATIENCE = timedelta(minutes=5)  # of a rank for the others, in a check
# What they do for one rank: the index of the result, and of what it is taken from.
COPIES = {"all_gather": (0, 1), "all_gather_into_tensor": (0, 1), "all_gather_object": (0, 1)}
IN_PLACE = ("all_reduce", "broadcast", "broadcast_object_list", "reduce", "barrier")
OTHERS = (
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "gather_object", "scatter_object_list"),
)


class UnequalError(Exception):
    """Ranks are about to do different things: they would wait for each other for ever."""


class FailedError(NotCheckedError):
    """Another rank has failed, which all ranks know."""


class UnequalShapesError(Exception):
    """Ranks gather tensors of different shapes."""


class TooSmallError(UnequalShapesError):
    """A part of the samples has no finite gradient, and all of them together have."""


class Ranks:
    """The ranks of a run, which compute the samples of a check at the same time."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.size, self.rank = trainer.world_size, trainer.global_rank
        is_alone = self.size == 1 or not dist.is_initialized()
        self.group = None if is_alone else dist.new_group(backend="gloo", timeout=PATIENCE)
        self.all_gather_object, self.all_reduce = dist.all_gather_object, dist.all_reduce
        self.ended: Exception | None = None  # why this check is over, in all ranks
        self.is_open = False  # a collective of the user's may begin
        self.num_collectives = 0  # of the user's

    def meet(self, value: Any) -> list[Any]:
        """Wait for all ranks; return what each one has, by rank."""
        if self.group is None:
            return [value]
        everyone = [None] * self.size
        before, self.is_open = self.is_open, True
        self.all_gather_object(everyone, value, self.group)
        self.is_open = before
        return everyone

    def agree(self, what: str, value: Any = None) -> list[Any]:
        """Return what each rank has; raise in all ranks, unless all are about to do the same."""
        if self.ended is not None:  # a step has caught it
            raise self.ended
        everyone = self.meet((what, value))
        names = [name for name, _ in everyone]
        if FAILED in names:
            self.ended = FailedError(next(why for name, why in everyone if name == FAILED))
        elif others := [name for name in names if name != names[0]]:
            self.ended = UnequalError(f"{names[0]}, another to {others[0]}")
        if self.ended is not None:
            raise self.ended
        return [value for _, value in everyone]

    def agree_on_shapes(self, what: str, tensors: list[Any]) -> None:
        """Raise in all ranks, unless all are about to do the same with tensors of one shape."""
        shapes = self.agree(what, [(*tensor.shape, str(tensor.dtype)) for tensor in tensors])
        if any(shape != shapes[0] for shape in shapes):
            raise UnequalShapesError

    def average(self, named: dict[str, Tensor]) -> None:
        """Average gradients over the ranks, in place."""
        names = self.agree("a backward pass", [*named])
        if any(one != names[0] for one in names):
            raise UnequalError("a gradient of other parameters")
        self.is_open = True
        for gradient in named.values():
            self.all_reduce(gradient)
            gradient /= self.size
        self.is_open = False

    def before_collective(self) -> None:
        """Refuse an operation that is not one of the functions below."""
        if not self.is_open:
            raise NotCheckedError("it calls torch.distributed on a group of its own")

    @contextmanager
    def as_one(self, trainer: pl.Trainer) -> Iterator[None]:
        """Let this rank be the only one, for whoever asks the trainer or ``torch.distributed``."""

        def alone(name: str, *args: Any, **kwargs: Any) -> Any:
            refuse_own_group(args, kwargs)
            if name in COPIES:
                if args and isinstance(args[0], list) and len(args[0]) > 1:
                    raise NotCheckedError("it gathers into a list for several ranks")
                target, source = ([*args, *kwargs.values()][i] for i in COPIES[name])
                if isinstance(target, list):
                    target[0] = source if name.endswith("object") else target[0].copy_(source)
                else:
                    target.copy_(source.view_as(target))
            elif name not in IN_PLACE:
                raise NotCheckedError(f"it calls torch.distributed.{name}")
            return Done() if kwargs.get("async_op") else None

        numbers: dict[str, Any] = {"is_initialized": lambda: False, "get_rank": lambda *_: 0}
        with seen_as_one_rank(trainer), replaced(alone, numbers):
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the ranks agree before each collective operation."""
        originals = {name: getattr(dist, name) for name in (*COPIES, *IN_PLACE, *OTHERS)}

        def agreed(name: str, *args: Any, **kwargs: Any) -> Any:
            refuse_own_group(args, kwargs)
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            self.agree_on_shapes(f"torch.distributed.{name}", tensors[-1:])
            self.is_open, self.num_collectives = True, self.num_collectives + 1
            try:
                return originals[name](*args, **kwargs)
            finally:
                self.is_open = False

        with replaced(agreed, {}):
            yield


@contextmanager
def replaced(function: Callable[..., Any], others: dict[str, Any]) -> Iterator[None]:
    """Replace the collective functions of ``torch.distributed`` by one that gets their names."""

    def named(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(name, *args, **kwargs)

    functions = {name: named(name) for name in (*COPIES, *IN_PLACE, *OTHERS)}
    replacements: Any = functions | others
    with patch.multiple(dist, **replacements):
        yield


class Done:
    """The handle of an operation that is over."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    is_completed = wait


def refuse_own_group(args: Any, kwargs: Any) -> None:
    """Refuse a collective of a part of the ranks, before it is entered."""
    groups = [a for a in (*args, kwargs.get("group")) if isinstance(a, dist.ProcessGroup)]
    if any(group is not dist.group.WORLD for group in groups):
        raise NotCheckedError("it calls torch.distributed on a group of its own")
