"""Asynchronous votes of all ranks at a training step, and a gather of Python objects.

In: numbers, such as the signal that this process received. Out: their maximum over all ranks, at
the same step on each. Next: ``checkpoints.safe_point``, which saves a checkpoint and exits.
"""

import time
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch
import torch.distributed as dist

# Votes are about 0.5 seconds apart, because each costs up to a millisecond. They are at most 10
# steps apart, because the next steps may take much longer than the measured ones.
SECONDS_BETWEEN, MOST_STEPS_BETWEEN = 0.5, 10


_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by default process group


class Vote:
    """The maximum of some numbers over all ranks, by an asynchronous all-reduce.

    The all-reduce runs during the training, in a gloo group of its own. Each rank reads the result
    when the next vote begins, so all ranks have it at the same step. The ranks also vote on the
    number of steps until the next vote. With a single process, the result is there at once.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        is_alone = trainer.world_size == 1 or not dist.is_initialized()
        self.group = None if is_alone else dist.new_group(backend="gloo")
        self.work: Any = None  # the running all-reduce
        self.votes = torch.empty(0)
        self.num_steps = self.steps_left = 1  # steps between votes; steps until the next vote
        self.vote_time = time.monotonic()

    def ask(self, *values: int) -> list[int] | None:
        """Return the maximum of each value over all ranks, from the previous vote.

        All ranks must call this at every step.

        Returns:
            ``None`` at a step without a result; the same ``values`` in a run of one process.
        """
        if self.group is None:
            return list(values)
        self.steps_left -= 1
        if self.steps_left:
            return None
        now = time.monotonic()
        steps_in_time = int(SECONDS_BETWEEN * self.num_steps / max(now - self.vote_time, 1e-9))
        self.vote_time = now
        result = None
        if self.work is not None:
            self.work.wait()
            *result, negative_steps = self.votes.tolist()
            self.num_steps = -negative_steps
        self.steps_left = self.num_steps
        # Negated, because MAX then yields the smallest number of steps, that of the slowest rank.
        negative_steps = -min(max(steps_in_time, 1), MOST_STEPS_BETWEEN)
        self.votes = torch.tensor([*values, negative_steps], dtype=torch.int32)
        self.work = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return result


def host_group() -> Any:
    """Return the gloo group of all ranks, which communicates between the hosts."""
    world = dist.group.WORLD
    if world not in _host_groups:
        is_on_host = dist.get_backend() == "gloo"
        _host_groups[world] = None if is_on_host else dist.new_group(backend="gloo")
    return _host_groups[world]


def gather(trainer: pl.Trainer, value: Any, group: Any = None, to_first: bool = False) -> list[Any]:
    """Return the value of each rank of the run or the group. All ranks must call this.

    The values go from host to host, and need no device memory. With ``to_first``, non-zero ranks
    get an empty list.
    """
    if trainer.world_size == 1:
        return [value]
    group = group or host_group()
    values = [None] * dist.get_world_size(group)
    if not to_first:
        dist.all_gather_object(values, value, group)
        return values
    dist.gather_object(value, values if trainer.is_global_zero else None, 0, group)
    return values if trainer.is_global_zero else []
