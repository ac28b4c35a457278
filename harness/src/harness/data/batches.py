"""The indices of one batch, and data sets that read whole batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from harness.data.randomness import generators_in, mix, number_of, reseed, seed_generators


class Batch(list[Any]):
    """Indices of one batch, with the epoch they belong to.

    It reaches ``Dataset.__getitems__`` as it is, in whichever worker, so that an augmentation
    can depend on (seed, epoch, sample) and on nothing else.
    """

    def __init__(self, indices: Sequence[Any], epoch: int = 0) -> None:
        super().__init__(indices)
        self.epoch = epoch

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        return Batch, (self[:], self.epoch)


class SeededBatch(Batch):
    """A batch that seeds all generators as torch takes each index to read its sample.

    torch reads ``[dataset[i] for i in batch]``: what ``__getitem__`` draws then depends on (seed,
    epoch, sample) alone, in whichever worker of whichever process. What a ``__getitems__`` draws
    for a whole batch depends on the batch's first sample, and what collating draws on its last.

    Args:
        indices: what the data set is read by.
        epoch: decides, with the seed and the sample, what is drawn.
        seed: of the run.
        generators: objects of the data set's own that are seeded as well.
    """

    def __init__(
        self, indices: Sequence[Any], epoch: int, seed: int, generators: Sequence[Any] = ()
    ) -> None:
        super().__init__(indices, epoch)
        self.seed, self.generators = seed, generators

    def begin(self) -> "SeededBatch":
        """Seed for the first sample, in the process that reads the batch, before it is read."""
        self._seed_for(self[0])
        return self

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            self._seed_for(index)
            yield index

    def _seed_for(self, index: Any) -> None:
        seed = mix(self.seed, self.epoch, index if type(index) is int else number_of(index))
        seed_generators(seed)
        for generator in self.generators:
            reseed(generator, seed)

    def __reduce__(self) -> tuple[Callable[..., "Batch"], tuple[Any, ...]]:
        return in_worker, (self[:], self.epoch, self.seed)


def in_worker(indices: list[Any], epoch: int, seed: int) -> SeededBatch:
    """Make a batch of the one that the training process has sent to this worker."""
    return SeededBatch(indices, epoch, seed, _generators_of_worker()).begin()


@lru_cache
def _generators_of_worker() -> list[Any]:
    """The generators of this worker's copy of the data set, which is the same for all batches."""
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
    """First and one-past-last position of share ``index`` of ``num_shares`` balanced shares.

    The sizes of the shares differ by one at most.
    """
    return -(-size * index // num_shares), -(-size * (index + 1) // num_shares)
