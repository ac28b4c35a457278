import operator
import zlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, Subset, default_collate

from harness.data.batches import Batch, BatchedDataset
from harness.data.randomness import (
    generators_in,
    kept_generators,
    mix,
    reseed,
    seed_generators,
)


class SeededSamples(BatchedDataset):
    """Read each sample of a data set with generators seeded by (seed, epoch, sample).

    An augmentation that draws from ``random``, ``numpy.random`` or ``torch`` then gives the same
    result in any worker of any process.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self.generators: list[Any] | None = None  # of the data set's own

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """What a module looks up at its data set, such as a vocabulary."""
        if name == "dataset":  # not there while this object is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What a module sets at its data set, such as the level of a curriculum."""
        if name in ("dataset", "seed", "collate", "generators"):
            super().__setattr__(name, value)
        else:
            setattr(self.dataset, name, value)

    def __getitem__(self, index: Any) -> Any:
        """A sample as the data set gives it, for whoever looks at one."""
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """Read and collate a batch; what collating draws depends on the batch's last sample."""
        assert isinstance(indices, Batch)
        if self.generators is None:  # each worker has copies of its own
            self.generators = generators_in(self.dataset)
        reads_batches = getattr(self.dataset, "__getitems__", None)
        samples = []
        with kept_generators():
            if reads_batches and not isinstance(self.dataset, Subset):  # which asks one by one
                seed_generators(mix(self.seed, indices.epoch, number_of(indices[0])))
                return self.collate(reads_batches(list(indices)))
            for index in indices:
                number = index if type(index) is int else number_of(index)
                seed = mix(self.seed, indices.epoch, number)
                seed_generators(seed)
                for generator in self.generators:
                    reseed(generator, seed)
                samples.append(self.dataset[index])
            return self.collate(samples)


def number_of(key: Any) -> int:
    """A number for what a sampler names a sample by, such as a NumPy integer or a file's name."""
    try:
        return int(operator.index(key))
    except TypeError:
        return zlib.crc32(repr(key).encode())
