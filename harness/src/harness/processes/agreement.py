import pickle
import time
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor

# Questions are about half a second apart, because each takes up to a millisecond; and never more
# than 10 steps, because the next ones may take much longer than those that were measured.
SECONDS_BETWEEN, MOST_STEPS_BETWEEN = 0.5, 10

SMALL = 4096  # bytes, which take no longer to gather than one


class Agreement:
    """Let the processes of a run decide together, without waiting for each other.

    A question travels beside the training, in a gloo group of its own, and its answer is used
    when the next one is asked: every process then has the same one. The answer also says after
    how many steps that is. One process decides at once.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        is_alone = trainer.world_size == 1 or not dist.is_initialized()
        self.group = None if is_alone else dist.new_group(backend="gloo")
        self.work: Any = None
        self.votes = torch.empty(0)
        self.num_steps = self.steps_left = 1
        self.asked_time = time.monotonic()

    def ask(self, *values: int) -> list[int] | None:
        """The largest of each value among all processes, as it was when last asked.

        To be called at every step.

        Returns:
            ``None`` at a step without an answer; one process always gets its own values.
        """
        if self.group is None:
            return list(values)
        self.steps_left -= 1
        if self.steps_left:
            return None
        now = time.monotonic()
        fitting = int(SECONDS_BETWEEN * self.num_steps / max(now - self.asked_time, 1e-9))
        self.asked_time = now
        answer = None
        if self.work is not None:
            self.work.wait()
            *answer, fewest = self.votes.tolist()
            self.num_steps = -fewest
        self.steps_left = self.num_steps
        # The slowest process decides: its number of steps is the smallest.
        fewest = -min(max(fitting, 1), MOST_STEPS_BETWEEN)
        self.votes = torch.tensor([*values, fewest], dtype=torch.int32)
        self.work = dist.all_reduce(self.votes, dist.ReduceOp.MAX, self.group, async_op=True)
        return answer


def gather(trainer: pl.Trainer, value: Any, group: Any = None) -> list[Any]:
    """What each process of the run, or of a group, has, by rank; all of them call it."""
    if trainer.world_size == 1:
        return [value]
    is_on_host = dist.get_backend(group) == "gloo"
    device = torch.device("cpu") if is_on_host else trainer.strategy.root_device
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    return [pickle.loads(one.cpu().numpy().data) for one in gather_bytes(packed, group)]


def gather_bytes(mine: Tensor, group: Any = None) -> list[Tensor]:
    """What each process of a group has, by rank, in one operation if all have little.

    ``dist.all_gather_object`` takes two, the first for how much it is.

    Args:
        mine: of this process, (N,) of uint8, where N may differ between processes.
        group: of which all processes call this.
    """
    size = torch.tensor([len(mine)]).view(torch.uint8).to(mine.device)
    first = torch.cat([size, mine[:SMALL], mine.new_zeros(max(0, SMALL - len(mine)))])
    everyone = _gather(first, group)
    sizes = torch.stack([one[: len(size)] for one in everyone]).cpu().view(torch.int64).flatten()
    if (largest := int(sizes.max())) > SMALL:
        rest = mine[SMALL:]
        rests = _gather(torch.cat([rest, rest.new_zeros(largest - SMALL - len(rest))]), group)
        everyone = [torch.cat(both) for both in zip(everyone, rests, strict=True)]
    return [one[len(size) : len(size) + n] for one, n in zip(everyone, sizes.tolist(), strict=True)]


def _gather(mine: Tensor, group: Any) -> list[Tensor]:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group)
    return everyone
