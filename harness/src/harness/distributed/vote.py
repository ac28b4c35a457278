"""Asynchronous votes of all ranks at a training step.

In: numbers, such as the signal that this process received. Out: their maximum over all ranks, at
the same step on each. Next: ``checkpoints.safe_point``, which saves a checkpoint and exits.
"""

import time
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

# Votes are about 0.5 seconds apart, because each costs up to a millisecond. They are at most 10
# steps apart, because the next steps may take much longer than the measured ones.
SECONDS_BETWEEN, MOST_STEPS_BETWEEN = 0.5, 10


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
        """Give this rank's values to the next vote; return the maxima of the vote before it.

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
