"""Batches of indices, data sets that read whole batches, and the weight of a local batch.

In: the indices that a sampler draws. Out: a ``Batch``, which seeds the random generators of the
code that reads it. Next: ``shared_batches`` and ``streams`` split global batches between the ranks.
"""

import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from harness.data.randomness import generators_in, mix_seed, reseed, seed_generators
from harness.errors import UserError


class Batch(list[Any]):
    """The indices of one batch, with their epoch. ``Dataset.__getitems__`` gets the whole batch.

    A batch with a seed seeds all random generators, and those that the data set holds, before each
    index that it yields. torch reads ``[dataset[i] for i in batch]``. In any worker of any rank,
    random numbers depend only on the seed, the epoch and one sample:

    - in ``__getitem__``: the sample that it reads,
    - in ``__getitems__``: the first sample of the batch,
    - in ``collate_fn``: the last sample of the batch.
    """

    def __init__(
        self,
        indices: Sequence[Any],
        epoch: int = 0,
        seed: int | None = None,
        generators: Sequence[Any] = (),
    ) -> None:
        super().__init__(indices)
        self.epoch, self.seed, self.generators = epoch, seed, generators

    def begin(self) -> "Batch":
        """Seed for the first sample, in the process that reads the batch, and return the batch."""
        if self.seed is not None:
            self._seed_for(self[0])
        return self

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self.seed is None else self._seeding()

    def _seeding(self) -> Iterator[Any]:
        for index in super().__iter__():
            self._seed_for(index)
            yield index

    def _seed_for(self, index: Any) -> None:
        assert self.seed is not None
        try:
            number = operator.index(index)
        except TypeError:  # a sampler may yield strings, tuples, ...
            number = zlib.crc32(repr(index).encode())
        seed = mix_seed(self.seed, self.epoch, number)
        seed_generators(seed)
        for generator in self.generators:
            reseed(generator, seed)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        return _in_worker, (self[:], self.epoch, self.seed)


def _in_worker(indices: list[Any], epoch: int, seed: int | None) -> Batch:
    """Rebuild a batch in the worker that received it."""
    return Batch(indices, epoch, seed, () if seed is None else _worker_generators()).begin()


@lru_cache
def _worker_generators() -> list[Any]:
    """Return the random generators of this worker's copy of the data set; search only once."""
    info = get_worker_info()
    return generators_in(info.dataset) if info else []


class BatchedDataset(Dataset[Any], ABC):
    """A data set that reads whole batches, which is faster than reading sample by sample.

    Its random numbers must depend only on (seed, epoch, index): use ``randomness.uniform`` and
    ``epoch_of``. The library reads other data sets sample by sample, with seeded generators.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in the data set."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Any:
        """Return the collated samples of a ``Batch`` of indices."""

    @staticmethod
    def epoch_of(indices: Sequence[Any]) -> int:
        """Return the epoch of a batch of indices, or 0 outside of a run."""
        return indices.epoch if isinstance(indices, Batch) else 0


class LocalBatchCounts:
    """The size and weight of this rank's local batches; subclasses implement ``counts``."""

    name = ""  # the loader's name in messages
    num_local_batches = 1  # local batches in a global batch: ranks x micro-batches

    def counts(self, batch_idx: int) -> tuple[int, int]:
        """Return the sizes of the local and the global batch; (0, 0) after the last batch."""
        raise NotImplementedError

    def weight(self, batch_idx: int) -> float:
        """Return local batch size / mean local batch size: the weight of this batch's gradient.

        Lightning averages ranks and accumulated batches with equal weights, which is wrong for
        local batches of unequal size. The weight is 1 if all local batches are equally large.
        """
        if self.num_local_batches == 1:
            return 1.0
        local_size, global_size = self.counts(batch_idx)
        if not global_size:
            raise UserError(
                f"{self.name}: the loader yields more batches than its batch_sampler, so the "
                "ranks cannot split them.\nYield one batch for each batch of the batch_sampler, "
                "or use one process."
            )
        return local_size * self.num_local_batches / global_size

    def is_padding(self, batch_idx: int) -> bool:
        """Return whether this local batch is empty. The rank then repeats a sample of weight 0."""
        local_size, global_size = self.counts(batch_idx)
        return local_size == 0 and global_size > 0

    def num_samples_in(self, batch_idx: int) -> int | None:
        """Return how many samples this rank computes, padding included; ``None`` if unknown."""
        local_size, global_size = self.counts(batch_idx)
        return max(1, local_size) if global_size else None


def local_bounds(size: int, index: int, num_local_batches: int) -> tuple[int, int]:
    """Return the range (first, last + 1) of local batch ``index`` within a global batch.

    The sizes of the ``num_local_batches`` local batches differ by at most one.
    """
    return -(-size * index // num_local_batches), -(-size * (index + 1) // num_local_batches)


def check_batch_size(size: int, num_processes: int, num_micro_batches: int, name: str) -> None:
    """Raise a ``UserError`` if a global batch has fewer samples than there are local batches."""
    min_size = num_processes * num_micro_batches
    if size < min_size:
        each = f" with {num_micro_batches} batches each per step" if num_micro_batches > 1 else ""
        raise UserError(
            f"{name} with batch_size={size} cannot be split between {num_processes} processes"
            f"{each}: batch_size counts the samples of one optimizer step over all processes.\n"
            f"Use {name} with batch_size={min_size} or more."
        )
