from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from harness.processes.agreement import gather_bytes


class StatesTogether:
    """Gather all states of a metric over the processes in one operation.

    torchmetrics takes two or three for each state, thirty for accuracy and F1 after a validation:
    on a CPU as long as a small network's epoch. What is gathered is the same.

    Args:
        metric: which takes this as its ``dist_sync_fn``.
    """

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.gathered: list[tuple[Tensor, list[Tensor]]] = []  # a state, and every process's

    def __call__(self, state: Tensor, group: Any = None) -> list[Tensor]:
        """Every process's value of a state, by rank; asked for one state after another."""
        for i, (own, values) in enumerate(self.gathered):
            if own is state:
                del self.gathered[i]  # asked for once in each synchronisation
                return values
        states = [one for one in self.metric.metric_state.values() if isinstance(one, Tensor)]
        is_one = any(one is state for one in states)  # and not of a list, which has any length
        if not is_one or (everyone := _gather(states, group)) is None:
            return gather_all_tensors(state, group)
        self.gathered = list(zip(states, everyone, strict=True))
        return self(state, group)


def _gather(states: list[Tensor], group: Any) -> list[list[Tensor]] | None:
    """Every process's value of each state; ``None`` where shapes or types differ."""
    kinds = [(crc32(str(one.dtype).encode()), one.dim(), *one.shape) for one in states]
    header = torch.tensor([number for kind in kinds for number in kind], device=states[0].device)
    parts = [header, *(state.detach() for state in states)]
    parts = [part.contiguous().reshape(-1).view(torch.uint8) for part in parts]
    everyone = gather_bytes(torch.cat(parts), group)
    sizes = [len(part) for part in parts]
    if any(len(one) != sum(sizes) or not one[: sizes[0]].equal(parts[0]) for one in everyone):
        return None
    by_rank = []
    for one in everyone:
        _, *split = torch.split(one, sizes)
        # A copy begins where a number may begin.
        values = zip((part.clone() for part in split), states, strict=True)
        by_rank.append([value.view(own.dtype).view(own.shape) for value, own in values])
    by_rank[dist.get_rank(group)] = states  # which may carry gradients
    return [list(of_state) for of_state in zip(*by_rank, strict=True)]
