"""One process's or worker's part of a stream, and how it is told from another's."""

import copy
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import IterableDataset, get_worker_info

from harness.data.randomness import mix, seed_generators

# Samples at a part's beginning that tell it from a copy; the first may be a header.
NUM_COMPARED = 2
NUM_VALUES = 1024  # of a tensor, in a checksum


class SeededStream(IterableDataset[Any]):
    """Read a process's or worker's part of a stream, with generators seeded by (seed, epoch).

    Args:
        stream: gives samples.
        seed: the run's seed.
        num_ranks: processes that read the stream.
        rank: which of them this one is.
    """

    def __init__(self, stream: IterableDataset[Any], seed: int, num_ranks: int, rank: int) -> None:
        self.stream, self.seed, self.num_ranks, self.rank = stream, seed, num_ranks, rank
        self.epoch = 0

    def __getattr__(self, name: str) -> Any:
        """What a ``worker_init_fn`` looks up at its data set."""
        if name == "stream":  # not there while this object is unpickled
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        num_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part = self.rank * num_workers + worker
        stream: Any = self.stream
        if hasattr(stream, "read_part"):
            stream = copy.copy(stream)  # so that the next epoch takes a part of the whole again
            stream.read_part(part, self.num_ranks * num_workers)
        # All begin alike, so that the same order of files in each of them can be told from parts.
        seed_generators(mix(self.seed, self.epoch))
        samples = iter(stream)
        yield from islice(samples, NUM_COMPARED)
        seed_generators(mix(self.seed, self.epoch, part))
        yield from samples


class Counting:
    """Collate, and give with each batch its number of samples and, once, how its part begins.

    Args:
        collate: the loader's ``collate_fn``.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate, self.is_first = collate, True

    def __call__(self, samples: list[Any]) -> tuple[int, int, Any]:
        """Make a batch."""
        begins = fingerprint(samples[:NUM_COMPARED]) if self.is_first else 0
        self.is_first = False
        return len(samples), begins, self.collate(samples)


def fingerprint(batch: Any) -> int:
    """Compute a checksum of a batch: of the first values of each tensor, and of all else."""
    try:
        return zlib.crc32(pickle.dumps(apply_to_collection(batch, torch.Tensor, _first_values)))
    except Exception:  # an object that cannot be pickled: it counts as unlike all others
        return random.SystemRandom().getrandbits(62)


def _first_values(value: torch.Tensor) -> Any:
    # torch's own pickles hold addresses.
    return value.detach().reshape(-1)[:NUM_VALUES].cpu().contiguous().view(torch.uint8).numpy()
