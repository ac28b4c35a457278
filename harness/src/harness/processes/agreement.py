"""Decide together: an asynchronous vote of all processes at each step, and what each one has.

In: numbers, such as the signal that this process got. Out: the largest among all processes, at the
same step in each. Next: ``checkpoints.safe_point``, which saves and leaves.
"""

import time
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch
import torch.distributed as dist

# Votes are about half a second apart, because each takes up to a millisecond; and never more than
# 10 steps, because the next ones may take much longer than those that were measured.
SECONDS_BETWEEN, MOST_STEPS_BETWEEN = 0.5, 10


_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of each group of all processes


class Agreement:
    """Let the processes of a run decide together, without waiting for each other.

    A vote travels beside the training, in a gloo group of its own, and its result is read when the
    next one begins: every process then has the same one. The result also says after how many steps
    that is. One process decides at once.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        is_alone = trainer.world_size == 1 or not dist.is_initialized()
        self.group = None if is_alone else dist.new_group(backend="gloo")
        self.work: Any = None
        self.votes = torch.empty(0)
        self.num_steps = self.steps_left = 1
        self.asked_time = time.monotonic()

    def ask(self, *values: int) -> list[int] | None:
        """Return the largest of each value among all processes, as of the vote before.

        To be called at every step.

        Returns:
            ``None`` at a step without a result; one process always gets its own values.
        """
        if self.group is None:
            return list(values)
        self.steps_left -= 1
        if self.steps_left:
            return None
        now = time.monotonic()
        fitting = int(SECONDS_BETWEEN * self.num_steps / max(now - self.asked_time, 1e-9))
        self.asked_time = now
        result = None
        if self.work is not None:
            self.work.wait()
            *result, fewest = self.votes.tolist()
            self.num_steps = -fewest
        self.steps_left = self.num_steps
        # The slowest process decides: its number of steps is the smallest.
        fewest = -min(max(fitting, 1), MOST_STEPS_BETWEEN)
        self.votes = torch.tensor([*values, fewest], dtype=torch.int32)
        self.work = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return result


def host_group() -> Any:
    """Return the group of all processes that sends through the hosts: of gloo."""
    world = dist.group.WORLD
    if world not in _host_groups:
        is_on_host = dist.get_backend() == "gloo"
        _host_groups[world] = None if is_on_host else dist.new_group(backend="gloo")
    return _host_groups[world]


def gather(trainer: pl.Trainer, value: Any, group: Any = None, to_first: bool = False) -> list[Any]:
    """Return what each process of the run, or of a group, has, by rank; all of them call it.

    It is sent from host to host, and needs no memory on a device. With `to_first` the other
    processes have no use for it, and get an empty list.
    """
    if trainer.world_size == 1:
        return [value]
    group = group or host_group()
    everyone = [None] * dist.get_world_size(group)
    if not to_first:
        dist.all_gather_object(everyone, value, group)
        return everyone
    dist.gather_object(value, everyone if trainer.is_global_zero else None, 0, group)
    return everyone if trainer.is_global_zero else []
