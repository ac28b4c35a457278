import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from harness.data.batches import Batch, BatchedDataset
from harness.data.randomness import mix


class SeededSamples(BatchedDataset):
    """Read each sample of a data set with generators seeded by (seed, epoch, sample).

    An augmentation that draws from ``random``, ``numpy.random`` or ``torch`` then gives the same
    result in any worker of any process.

    Args:
        dataset: read sample by sample.
        seed: the run's seed.
        collate: makes a batch of a list of samples.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, indices: list[int]) -> Any:
        """Read and collate a batch."""
        assert isinstance(indices, Batch)
        samples = []
        with kept_generators():
            for index in indices:
                seed_generators(mix(self.seed, indices.epoch, index))
                samples.append(self.dataset[index])
        return self.collate(samples)


def seed_generators(seed: int) -> None:
    """Seed the generators that code on the CPU draws from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators back afterwards: without workers, dropout draws from the same ones."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
