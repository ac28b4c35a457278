"""The batches of torch's own shuffling sampler, in eight bytes per sample.

In: a ``BatchSampler`` of a ``RandomSampler``. Out: the same batches in the same order. torch makes
a Python list of the permutation, about 60 bytes per sample in each rank, before the first batch.
This module keeps the tensor of ``torch.randperm``, so a resumed run starts at any batch at once.
"""

import math
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

BATCHES_PER_BLOCK = 64  # batches that become Python lists at a time


def is_stock_shuffle(batches: Any) -> bool:
    """Return whether torch's own samplers draw a permutation, which no subclass changes."""
    sampler = getattr(batches, "sampler", None)
    is_stock = type(batches) is BatchSampler and type(sampler) is RandomSampler
    return is_stock and not sampler.replacement  # type: ignore[union-attr]


class ShuffledBatches:
    """The batches of one pass over a stock sampler, drawn as the sampler draws them.

    Args:
        batches: a batch sampler for which ``is_stock_shuffle`` returns true.
    """

    def __init__(self, batches: Any) -> None:
        self.size: int = batches.batch_size
        sampler: Any = batches.sampler
        num_all, num_samples = len(sampler.data_source), sampler.num_samples
        generator = sampler.generator
        if generator is None:  # seeded by the global generator, as in ``RandomSampler``
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        rounds = [
            torch.randperm(num_all, generator=generator)
            for _ in range(math.ceil(num_samples / num_all))
        ]
        order = rounds[0] if len(rounds) == 1 else torch.cat(rounds)
        num = num_samples - num_samples % self.size if batches.drop_last else num_samples
        self.order: torch.Tensor = order[:num]

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def iterate(self, first: int = 0) -> Iterator[list[int]]:
        """Yield the batches from the batch ``first`` on."""
        for start in range(first * self.size, len(self.order), self.size * BATCHES_PER_BLOCK):
            indices = self.order[start : start + self.size * BATCHES_PER_BLOCK].tolist()
            for low in range(0, len(indices), self.size):
                yield indices[low : low + self.size]

    def checksum(self, num_batches: int, before: int) -> int:
        """Return the result of ``checksum`` after the first ``num_batches``, without lists."""
        content: Any = self.order[: num_batches * self.size].numpy().data
        return zlib.crc32(content, before)


def checksum(indices: Sequence[Any], before: int) -> int:
    """Return a checksum of a batch's indices, or of other keys, and of the batches before it."""
    try:
        content = array("q", indices).tobytes()
    except (TypeError, OverflowError):  # keys that are not whole numbers
        content = repr(indices).encode()
    return zlib.crc32(content, before)


def compact(indices: list[Any]) -> Sequence[Any]:
    """Return indices in eight bytes each, if all are Python integers; else the list."""
    return array("q", indices) if {*map(type, indices)} == {int} else indices
