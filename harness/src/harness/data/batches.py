"""The indices of one batch, which seed what reads them, and data sets that read whole batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from harness.data.randomness import generators_in, mix, reseed, sample_number, seed_generators


class Batch(list[Any]):
    """Indices of one batch, with the epoch they belong to; ``Dataset.__getitems__`` gets it whole.

    With a seed it seeds all generators as torch takes each index, in ``[dataset[i] for i in
    batch]``: what ``__getitem__`` draws depends on (seed, epoch, sample) alone, in whichever worker
    of whichever process. What a ``__getitems__`` draws depends on the first sample, and what
    collating draws on the last.

    Args:
        indices: what the data set is read by.
        epoch: the epoch.
        seed: the run's seed; ``None`` for a ``BatchedDataset``, which draws by ``uniform``.
        generators: objects that the data set draws from, which are seeded as well.
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
        indices = super().__iter__()
        return indices if self.seed is None else self._seeding(indices)

    def _seeding(self, indices: Iterator[Any]) -> Iterator[Any]:
        for index in indices:
            self._seed_for(index)
            yield index

    def _seed_for(self, index: Any) -> None:
        assert self.seed is not None
        seed = mix(self.seed, self.epoch, index if type(index) is int else sample_number(index))
        seed_generators(seed)
        for generator in self.generators:
            reseed(generator, seed)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        return _in_worker, (self[:], self.epoch, self.seed)


def _in_worker(indices: list[Any], epoch: int, seed: int | None) -> Batch:
    """Make a batch again, in the worker that it was sent to."""
    return Batch(indices, epoch, seed, () if seed is None else _worker_generators()).begin()


@lru_cache
def _worker_generators() -> list[Any]:
    """Find the generators of this worker's copy of the data set, once for all batches."""
    info = get_worker_info()
    return generators_in(info.dataset) if info else []


class BatchedDataset(Dataset[Any], ABC):
    """A data set that reads whole batches, which is faster than sample by sample.

    What it draws at random must depend on (seed, ``indices.epoch``, index): see
    ``randomness.uniform``. Other data sets are read sample by sample, with seeded generators.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples in the data set."""

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Any:
        """Read the samples of a ``Batch`` of indices, collated."""


def bounds(size: int, index: int, num_shares: int) -> tuple[int, int]:
    """Return the first and one-past-last position of one of several balanced shares.

    The sizes of the shares differ by one at most.
    """
    return -(-size * index // num_shares), -(-size * (index + 1) // num_shares)
