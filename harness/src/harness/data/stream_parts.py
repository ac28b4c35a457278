"""One process's or worker's part of a stream, and how it is told from another's."""

import copy
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
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
        self.current: Any = stream  # what is read, and knows its place
        self.epoch = 0
        self.goes_on = False  # from a state that the stream has loaded

    def __getattr__(self, name: str) -> Any:
        """What a module looks up at its data set, such as a vocabulary."""
        if name in ("stream", "current"):  # not there while this object is unpickled
            raise AttributeError(name)
        return getattr(self.current, name)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        num_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part = self.rank * num_workers + worker
        if hasattr(self.stream, "read_part"):
            # A copy, so that the next epoch takes a part of the whole again.
            self.current = copy.copy(self.stream)
            self.current.read_part(part, self.num_ranks * num_workers)
        if self.goes_on:
            yield from self.current
            return
        # All begin alike, so that the same order of files in each of them can be told from parts.
        seed_generators(mix(self.seed, self.epoch))
        samples = iter(self.current)
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
        plain = apply_to_collection(batch, (torch.Tensor, np.ndarray), _first_values)
        return zlib.crc32(pickle.dumps(plain))
    except Exception:  # an object that cannot be pickled: it counts as unlike all others
        return random.SystemRandom().getrandbits(62)


def _first_values(value: Any) -> bytes:
    # torch's own pickles hold addresses.
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)[:NUM_VALUES].cpu().contiguous()
        return flat.view(torch.uint8).numpy().tobytes()
    return value.reshape(-1)[:NUM_VALUES].tobytes()  # type: ignore[no-any-return]
