"""Streams: iterable data sets, and loaders with an ``__iter__`` of their own.

A single process reads any stream as torch does. With several ranks, a stream must follow these
rules:

- *Splitting.* The data set (or the iterable itself, if it is no ``DataLoader``) has a method
  ``read_part(part, num_parts)``. The library calls it before the iteration, in the rank or worker
  that reads. The method selects the samples for this reader. If the stream splits itself, the
  method does nothing.
- *Randomness.* The stream draws from ``random``, ``numpy.random`` or ``torch``, which are seeded by
  (seed, epoch). The seeds are equal in all readers at first, so a stream may shuffle an order and
  split it afterwards.
- *Resume.* A resumed run reads the epoch from its start, and drops the batches that the run has
  already trained on. The stream must yield the same samples again, with as many ranks and workers.
- *Uneven ends.* A rank whose part has ended repeats its last batch with weight 0 until all other
  ranks have ended as well.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.data import extract_batch_size
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from harness.data.batches import LocalBatchCounts, check_batch_size, local_bounds
from harness.data.loaders import rebuild_loader, world_size_and_rank
from harness.data.randomness import END, mix_seed, seed_generators, seeded_iteration
from harness.errors import UserError

NUM_ALIKE = 2  # after this many samples, each reader gets a seed of its own


class StreamPart(IterableDataset[Any]):
    """Read the part of a stream for one rank or worker, with generators seeded by (seed, epoch)."""

    def __init__(self, stream: Any, seed: int, num_ranks: int, rank: int) -> None:
        self.__stream, self.__seed, self.__epoch = stream, seed, 0
        self.__num_ranks, self.__rank = num_ranks, rank

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream, which a ``worker_init_fn`` may read and set."""
        if name.startswith("_StreamPart__"):  # missing while this object is unpickled
            raise AttributeError(name)
        return getattr(self.__stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_StreamPart__")
        super().__setattr__(name, value) if is_own else setattr(self.__stream, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in a stream that has a ``set_epoch``."""
        self.__epoch = epoch
        if callable(set_epoch := getattr(self.__stream, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        num_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part = self.__rank * num_workers + worker
        stream = self.__stream
        if hasattr(stream, "read_part"):
            stream = copy.copy(stream)  # so that the next epoch splits the whole stream again
            stream.read_part(part, self.__num_ranks * num_workers)
        seed_generators(mix_seed(self.__seed, self.__epoch))
        samples = iter(stream)
        yield from islice(samples, NUM_ALIKE)
        seed_generators(mix_seed(self.__seed, self.__epoch, part))
        yield from samples


def _with_count(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, Any]:
    """Return the number of samples, and their batch."""
    return len(samples), collate(samples)


@dataclass(eq=False, repr=False)
class SharedStream(LocalBatchCounts):
    """Yield this rank's batches of a stream, in equally many steps on all ranks."""

    loader: Any
    name: str  # the loader's name in messages
    num_ranks: int = 1  # ranks that read the stream
    rank: int = 0  # of this process
    seed: int = 0
    # The global batch size, or ``None`` if the stream yields ready batches. If this is set, the
    # ``loader`` yields (number of samples, batch).
    batch_size: int | None = None
    seeds_transfer = False  # see ``SharedLoader``

    def __post_init__(self) -> None:
        self.num_local_batches = self.num_ranks
        self.epoch = 0
        self.start = (0, 0)  # the epoch and batch at which a run resumes
        self.sizes: dict[int, tuple[int, int]] = {}  # recent batches: local and global size
        self.sampler = self.batch_sampler = self  # Lightning calls their set_epoch
        self.group: Any = None

    def __len__(self) -> int:
        if self.num_local_batches > 1:
            raise TypeError("parts of a stream differ in length")
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``."""
        self.epoch = epoch

    def start_at(self, epoch: int, step: int, saved: Any = None) -> None:
        """Let ``epoch`` begin at ``step``."""
        # Lightning reads the first batches before it calls set_epoch.
        self.start, self.epoch = (epoch, step), epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the state for a checkpoint. Nothing verifies that a stream repeats its samples."""
        return {"settings": self.settings()}

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the batches. A resumed run must have the same."""
        settings = {"stream": self.name, "batch_size": self.batch_size, "seed": self.seed}
        num_workers = getattr(self.loader, "num_workers", 0)
        num_processes = self.num_local_batches
        return settings | {"number of processes": num_processes, "num_workers": num_workers}

    def counts(self, batch_idx: int) -> tuple[int, int]:
        """See ``LocalBatchCounts``."""
        return self.sizes.get(batch_idx, (1, self.num_local_batches))

    def num_samples_in(self, batch_idx: int) -> int | None:
        """See ``LocalBatchCounts``; ``None`` for a stream that yields ready batches."""
        return super().num_samples_in(batch_idx) if self.batch_size else None

    def __iter__(self) -> Iterator[Any]:
        self.sizes = {}
        first = self.start[1] if self.epoch == self.start[0] else 0
        dataset = getattr(self.loader, "dataset", None)
        if callable(set_epoch := getattr(dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        items = seeded_iteration(self.loader, mix_seed(self.seed, self.epoch))
        batch = END
        for k, item in enumerate(chain(items, repeat(END))):
            if k < first:
                if item is END:
                    raise UserError(
                        f"{self.name} ended after {k} batches, but the run was stopped after "
                        f"{first}: the data have changed.\nUse the data that the run began with."
                    )
                continue
            local_size, new_batch = self._with_size(item)
            self.sizes[k] = (local_size, self._sum(local_size))
            self.sizes.pop(k - 4, None)  # Lightning reads some batches ahead
            if self.seeds_transfer:  # also for the last batch, while the end is read ahead
                seed_generators(mix_seed(self.seed, self.epoch, k, self.rank, 1))
            if self.sizes[k][1] == 0:
                return
            batch = batch if new_batch is END else new_batch
            if batch is END:
                raise UserError(
                    f"{self.name} has no batch for rank {self.rank} of "
                    f"{self.num_local_batches} processes."
                    "\nUse fewer processes, or more samples."
                )
            yield batch

    def _with_size(self, item: Any) -> tuple[int, Any]:
        """Return an item's number of samples and its batch; (0, ``END``) at the end."""
        if item is END:
            return 0, END
        if self.batch_size:
            return item  # type: ignore[no-any-return]  # from ``_with_count``
        return max(1, extract_batch_size(item)) if self.num_local_batches > 1 else 1, item

    def _sum(self, number: int) -> int:
        if self.num_local_batches == 1:
            return number
        self.group = self.group or dist.new_group(backend="gloo")
        total = torch.tensor(number)
        dist.all_reduce(total, group=self.group)
        return int(total)


def share_stream(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int
) -> SharedStream:
    """Wrap a loader that has its own ``__iter__`` or an iterable data set.

    Raises:
        UserError: if the stream cannot be split between the ranks.
    """
    num_ranks, rank = world_size_and_rank(trainer)
    is_dataloader = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    data = getattr(loader, "dataset", loader)
    name = f"{name} ({type(data if is_dataloader else loader).__name__})"
    if split == "train" and trainer.accumulate_grad_batches > 1:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} splits batches, "
            f"but {name} is a stream, whose batches cannot be split.\nLeave out "
            "trainer.accumulate_grad_batches, and use smaller batches."
        )
    splitter = data if hasattr(data, "read_part") else loader
    is_splittable = hasattr(splitter, "read_part")
    if num_ranks > 1 and not is_splittable:
        raise UserError(
            f"{name} is a stream, and each of {num_ranks} processes would read the whole stream.\n"
            "Give its data set `def read_part(self, part, num_parts)`, which selects the samples "
            "of each process and worker (and does nothing if the stream splits itself), or use "
            "one process."
        )
    num_workers = getattr(loader, "num_workers", 0)
    size = loader.batch_size if is_dataloader else None
    if num_ranks > 1 and rank == 0:
        step = f"{size} samples" if size else f"{num_ranks} of its batches"
        print(
            f"{name} is a stream: each of {num_ranks} processes reads its own part. A step uses "
            f"{step} over all processes, but other samples than with one process.",
            flush=True,
        )
    elif num_workers > 1 and not is_splittable:
        print(
            f"{name} is a stream without a read_part, read by {num_workers} workers. If the "
            "stream does not split itself, each worker reads the whole stream. In that case, use "
            "num_workers=1."
        )
    if is_dataloader:
        batches = {"batch_size": size, "collate_fn": loader.collate_fn}
        if size is not None:
            check_batch_size(size, num_ranks, 1, name)
            low, high = local_bounds(size, rank, num_ranks)
            batches = {"batch_size": high - low, "drop_last": loader.drop_last}
            batches["collate_fn"] = partial(_with_count, loader.collate_fn)
        loader = rebuild_loader(loader, StreamPart(data, seed, num_ranks, rank), **batches)
    elif is_splittable:
        splitter.read_part(rank, num_ranks)
    return SharedStream(loader, name, num_ranks, rank, seed, size)
