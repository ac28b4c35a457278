"""Collective operations of the user's code during a parity check.

A check computes the same few samples in two passes. In both, the user's code may call
``torch.distributed``:

- ``Ranks.as_one``: each rank computes as if it were the only one. A collective returns what a
  single process would get.
- ``Ranks.together``: the ranks compute together. Before a collective starts, ``agree`` compares
  which operation each rank is about to call. If they differ, the check ends on all ranks.

So no rank hangs if another rank fails or takes another branch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor

from harness.compat.one_rank import seen_as_one_rank
from harness.parity.snapshot import NotCheckedError

FAILED = "the end, because it has failed"
TIMEOUT = timedelta(minutes=5)  # how long a rank waits for the others in a check
# Collectives that copy their input on a single rank: argument indices of the output and the input.
COPIES = {"all_gather": (0, 1), "all_gather_into_tensor": (0, 1), "all_gather_object": (0, 1)}
IN_PLACE = ("all_reduce", "broadcast", "broadcast_object_list", "reduce", "barrier")
UNSUPPORTED = (  # refused in ``Ranks.as_one``
    *("gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"),
    *("all_to_all_single", "gather_object", "scatter_object_list"),
)


class UnequalError(Exception):
    """The ranks are about to call different operations, so each would wait for the others."""


class FailedError(NotCheckedError):
    """Another rank has failed. All ranks raise this error."""


class UnequalShapesError(Exception):
    """The ranks gather tensors of different shapes."""


class TooSmallError(UnequalShapesError):
    """The gradient of some of the samples is not finite, although that of all samples is finite."""


class Ranks:
    """The ranks of a run, which compute the samples of a parity check at the same time."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.size, self.rank = trainer.world_size, trainer.global_rank
        is_alone = self.size == 1 or not dist.is_initialized()
        self.group = None if is_alone else dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.all_gather_object, self.all_reduce = dist.all_gather_object, dist.all_reduce
        self.ended: Exception | None = None  # why the check has ended on all ranks
        self.is_open = False  # whether a collective may start now
        self.num_collectives = 0  # called by the user's code

    def all_values(self, value: Any) -> list[Any]:
        """Return the values of all ranks, ordered by rank. Every rank must call this."""
        if self.group is None:
            return [value]
        by_rank = [None] * self.size
        was_open, self.is_open = self.is_open, True
        self.all_gather_object(by_rank, value, self.group)
        self.is_open = was_open
        return by_rank

    def agree(self, operation: str, value: Any = None) -> list[Any]:
        """Return the values of all ranks; raise on all ranks if their next operations differ.

        Args:
            operation: what this rank is about to do, as it appears in the error.
            value: what this rank contributes.

        Raises:
            FailedError: another rank has failed.
            UnequalError: the ranks name different operations.
        """
        if self.ended is not None:  # the user's step has caught the error
            raise self.ended
        by_rank = self.all_values((operation, value))
        names = [name for name, _ in by_rank]
        if FAILED in names:
            self.ended = FailedError(next(why for name, why in by_rank if name == FAILED))
        elif others := [name for name in names if name != names[0]]:
            self.ended = UnequalError(f"one rank reaches {names[0]}, another {others[0]}")
        if self.ended is not None:
            raise self.ended
        return [value for _, value in by_rank]

    def agree_on_shapes(self, operation: str, tensors: list[Any]) -> None:
        """Raise on all ranks if their operations, shapes or dtypes differ."""
        shapes = self.agree(operation, [(*tensor.shape, str(tensor.dtype)) for tensor in tensors])
        if any(shape != shapes[0] for shape in shapes):
            raise UnequalShapesError

    def average(self, gradients: dict[str, Tensor]) -> None:
        """Average gradients over the ranks, in place.

        Args:
            gradients: by name of the parameter.
        """
        names_by_rank = self.agree("a backward pass", [*gradients])
        if any(names != names_by_rank[0] for names in names_by_rank):
            raise UnequalError("the ranks have gradients of different parameters")
        self.is_open = True
        for gradient in gradients.values():
            self.all_reduce(gradient)
            gradient /= self.size
        self.is_open = False

    def before_collective(self) -> None:
        """Raise if the user's code starts a collective that ``agree`` has not compared."""
        if not self.is_open:
            raise NotCheckedError("it calls a collective that the check cannot compare by rank")

    @contextmanager
    def as_one(self, trainer: pl.Trainer) -> Iterator[None]:
        """Let the trainer and ``torch.distributed`` report a single rank in this context."""

        def call_alone(name: str, *args: Any, **kwargs: Any) -> Any:
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

        queries: dict[str, Any] = {"is_initialized": lambda: False, "get_rank": lambda *_: 0}
        with seen_as_one_rank(trainer), replaced_collectives(call_alone, queries):
            yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Compare the ranks' calls before each collective in this context."""
        originals = {name: getattr(dist, name) for name in (*COPIES, *IN_PLACE, *UNSUPPORTED)}

        def call_together(name: str, *args: Any, **kwargs: Any) -> Any:
            refuse_own_group(args, kwargs)
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            self.agree_on_shapes(f"torch.distributed.{name}", tensors[-1:])
            self.is_open, self.num_collectives = True, self.num_collectives + 1
            try:
                return originals[name](*args, **kwargs)
            finally:
                self.is_open = False

        with replaced_collectives(call_together, {}):
            yield


@contextmanager
def replaced_collectives(function: Callable[..., Any], others: dict[str, Any]) -> Iterator[None]:
    """Replace the collectives of ``torch.distributed`` by calls of ``function``.

    Args:
        function: is called with the name of the collective and its arguments.
        others: further replacements, by name.
    """

    def named(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(name, *args, **kwargs)

    functions = {name: named(name) for name in (*COPIES, *IN_PLACE, *UNSUPPORTED)}
    replacements: Any = functions | others
    with patch.multiple(dist, **replacements):
        yield


class Done:
    """The handle of an operation that has finished."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    is_completed = wait


def refuse_own_group(args: Any, kwargs: Any) -> None:
    """Raise if a collective runs on a process group that is not the group of all ranks."""
    groups = [a for a in (*args, kwargs.get("group")) if isinstance(a, dist.ProcessGroup)]
    if any(group is not dist.group.WORLD for group in groups):
        raise NotCheckedError("it calls torch.distributed with its own process group")
