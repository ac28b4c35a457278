from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist


class Agreement:
    """Let the processes of a run decide together, without waiting for each other.

    Each step's question travels beside the training, in a gloo group of its own, and its answer is
    used at the next step: every process then has the same one. One process decides at once.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        is_alone = trainer.world_size == 1 or not dist.is_initialized()
        self.group = None if is_alone else dist.new_group(backend="gloo")
        self.work: Any = None
        self.votes = torch.empty(0)

    def ask(self, *values: int) -> list[int]:
        """The largest of each value among all processes, as it was at the step before.

        One process gets its own values as they are.
        """
        if self.group is None:
            return list(values)
        answer = [0] * len(values)
        if self.work is not None:
            self.work.wait()
            answer = self.votes.tolist()
        self.votes = torch.tensor(values, dtype=torch.int32)
        self.work = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return answer

    def settle(self) -> None:
        """Wait for a question that is under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def gather(self, value: Any) -> list[Any]:
        """What each process has, by rank."""
        if self.group is None:
            return [value]
        values = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, self.group)
        return values
