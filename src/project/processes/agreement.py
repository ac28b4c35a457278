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
        self.votes = torch.zeros(3, dtype=torch.int32)

    def ask(self, is_due: bool, signum: int, must_stop: bool) -> tuple[bool, int, bool]:
        """Whether a checkpoint is due, which signal has come, whether to stop: for any process."""
        if self.group is None:
            return is_due, signum, must_stop
        answer = (False, 0, False)
        if self.work is not None:
            self.work.wait()
            due, signum_of_any, stop = self.votes.tolist()
            answer = (bool(due), signum_of_any, bool(stop))
        self.votes = torch.tensor([is_due, signum, must_stop], dtype=torch.int32)
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
