"""The indices of a batch, data sets that read whole batches, and how a share of a batch counts.

In: what a sampler has drawn. Out: a ``Batch``, which seeds the generators of whatever reads it.
Next: ``shared_batches`` and ``streams`` give each process its share.
"""

import operator
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from harness.data.randomness import generators_in, mix, reseed, seed_generators
from harness.errors import UserError


class Batch(list[Any]):
    """Indices of one batch, with the epoch they belong to; ``Dataset.__getitems__`` gets it whole.

    With a seed it seeds all generators, and those that the data set holds, as torch takes each
    index, in ``[dataset[i] for i in batch]``: what ``__getitem__`` draws depends on (seed, epoch,
    sample) alone, in whichever worker of whichever process. What a ``__getitems__`` draws depends
    on the first sample, and what collating draws on the last.
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
        """Seed for the first sample, in the process that is about to read the batch."""
        if self.seed is not None:
            self._seed_for(self[0])
        return self

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            if self.seed is not None:
                self._seed_for(index)
            yield index

    def _seed_for(self, index: Any) -> None:
        assert self.seed is not None
        try:
            number = operator.index(index)
        except TypeError:  # samplers may name samples by texts, tuples, ...
            number = zlib.crc32(repr(index).encode())
        seed = mix(self.seed, self.epoch, number)
        seed_generators(seed)
        for generator in self.generators:
            reseed(generator, seed)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        return _in_worker, (self[:], self.epoch, self.seed)


def _in_worker(indices: list[Any], epoch: int, seed: int | None) -> Batch:
    """Rebuild a batch in the worker that it was sent to."""
    return Batch(indices, epoch, seed, () if seed is None else _worker_generators()).begin()


@lru_cache
def _worker_generators() -> list[Any]:
    """Find the generators of this worker's copy of the data set, once for all batches."""
    info = get_worker_info()
    return generators_in(info.dataset) if info else []


class BatchedDataset(Dataset[Any], ABC):
    """A data set that reads whole batches, which is faster than sample by sample.

    What it draws at random must depend on (seed, epoch, index): see ``randomness.uniform`` and
    ``epoch_of``. Other data sets are read sample by sample, with seeded generators.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in the data set."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Any:
        """Read the samples of a ``Batch`` of indices, collated."""

    @staticmethod
    def epoch_of(indices: Sequence[Any]) -> int:
        """Return the epoch that a batch of indices belongs to; 0 outside of a run."""
        return indices.epoch if isinstance(indices, Batch) else 0


class ShareCounts:
    """How a process's share of each batch counts; subclasses say how large it is."""

    name = ""  # of the loader, in messages
    num_shares = 1  # in a global batch

    def counts(self, batch_idx: int) -> tuple[int, int]:
        """Return the samples of a batch in this process, and in all; (0, 0) behind the end."""
        raise NotImplementedError

    def weight(self, batch_idx: int) -> float:
        """Return the factor that turns this share's mean gradient into its term of the global mean.

        Processes and accumulated batches are averaged with equal weights by the framework;
        shares of unequal size must not be. It is 1 wherever the shares are equal.
        """
        if self.num_shares == 1:
            return 1.0
        here, everywhere = self.counts(batch_idx)
        if not everywhere:
            raise UserError(
                f"{self.name}: the loader gives more batches than its batch_sampler, and processes "
                "cannot share them.\nLet it give one for each, or use one process."
            )
        return here * self.num_shares / everywhere

    def is_padding(self, batch_idx: int) -> bool:
        """Say whether this share is empty, and repeats another sample with weight 0."""
        here, everywhere = self.counts(batch_idx)
        return here == 0 and everywhere > 0

    def num_samples_in(self, batch_idx: int) -> int | None:
        """Count the samples that this process computes, padding included; ``None`` if unknown."""
        here, everywhere = self.counts(batch_idx)
        return max(1, here) if everywhere else None


def bounds(size: int, index: int, num_shares: int) -> tuple[int, int]:
    """Return the first and one-past-last position of one of several balanced shares.

    The sizes of the shares differ by one at most.
    """
    return -(-size * index // num_shares), -(-size * (index + 1) // num_shares)


def check_batch_size(size: int, num_processes: int, num_micro_batches: int, name: str) -> None:
    """Refuse a global batch that leaves a process without a sample."""
    least = num_processes * num_micro_batches
    if size < least:
        each = f" with {num_micro_batches} batches each per step" if num_micro_batches > 1 else ""
        raise UserError(
            f"{name} with batch_size={size} cannot be shared by {num_processes} processes{each}: "
            "it counts the samples of one optimizer step over all of them.\n"
            f"Use {name} with batch_size={least} or more."
        )
