"""Streams: iterable data sets, and loaders that iterate by themselves.

One process reads any stream as torch does. Several need the contract:

- *Parts.* The data set (or what is iterated, if it is no ``DataLoader``) has ``read_part(part,
  num_parts)``. It is called in whichever process or worker reads, before it is iterated, and
  chooses what is read there; a stream that splits itself has one that does nothing.
- *Randomness* comes from ``random``, ``numpy.random`` or ``torch``, which are seeded by
  (seed, epoch). They begin alike in all parts, so an order may be shuffled before it is split.
- *Resume.* A resumed run reads what it has seen of the epoch again, and drops it. The stream must
  give the same again, to as many processes and workers.
- *Uneven ends.* A process whose part has ended repeats its last batch with weight 0 until the
  others have ended as well.
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

from harness.data.batches import ShareCounts, bounds, check_batch_size
from harness.data.loaders import num_processes_and_rank, rebuilt
from harness.data.randomness import END, mix, seed_generators, seeded_iteration
from harness.errors import UserError

NUM_ALIKE = 2  # samples of each part before its own random numbers begin


class StreamPart(IterableDataset[Any]):
    """Read a process's or worker's part of a stream, with generators seeded by (seed, epoch)."""

    def __init__(self, stream: Any, seed: int, num_ranks: int, rank: int) -> None:
        self.__stream, self.__seed, self.__epoch = stream, seed, 0
        self.__num_ranks, self.__rank = num_ranks, rank

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute of the stream, which a ``worker_init_fn`` may read and set."""
        if name.startswith("_StreamPart__"):  # not there while this object is unpickled
            raise AttributeError(name)
        return getattr(self.__stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_StreamPart__")
        super().__setattr__(name, value) if is_own else setattr(self.__stream, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Choose what is drawn next; a stream with a ``set_epoch`` is told."""
        self.__epoch = epoch
        if callable(announce := getattr(self.__stream, "set_epoch", None)):
            announce(epoch)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        num_workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part = self.__rank * num_workers + worker
        stream = self.__stream
        if hasattr(stream, "read_part"):
            stream = copy.copy(stream)  # so that the next epoch takes a part of the whole again
            stream.read_part(part, self.__num_ranks * num_workers)
        seed_generators(mix(self.__seed, self.__epoch))
        samples = iter(stream)
        yield from islice(samples, NUM_ALIKE)
        seed_generators(mix(self.__seed, self.__epoch, part))
        yield from samples


def _counted(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, Any]:
    return len(samples), collate(samples)


@dataclass(eq=False, repr=False)
class SharedStream(ShareCounts):
    """Let processes read a loader that iterates by itself, each its part, in equally many steps."""

    loader: Any
    name: str  # of the loader, in messages
    num_ranks: int = 1  # processes that read the stream
    rank: int = 0  # of this process
    seed: int = 0
    # Samples of a step over all processes, if known; then ``loader`` gives (number of samples,
    # batch).
    batch_size: int | None = None
    seeds_transfer = False  # see ``SharedLoader``

    def __post_init__(self) -> None:
        self.num_shares = self.num_ranks
        self.epoch = 0
        self.start = (0, 0)  # the epoch and batch at which a run goes on
        self.sizes: dict[int, tuple[int, int]] = {}  # of the last batches, here and of all
        self.sampler = self.batch_sampler = self  # where Lightning announces the epoch
        self.group: Any = None

    def __len__(self) -> int:
        if self.num_shares > 1:
            raise TypeError("parts of a stream differ in length")
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next ``iter``."""
        self.epoch = epoch

    def start_at(self, epoch: int, step: int, saved: Any = None) -> None:
        """Let ``epoch`` begin at a step."""
        # Lightning asks for the first batches before it announces the epoch.
        self.start, self.epoch = (epoch, step), epoch

    def state_at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return what a checkpoint keeps; what a stream gives again is not compared."""
        return {"settings": self.settings()}

    def settings(self) -> dict[str, Any]:
        """Return what the batches depend on, which a resumed run must have as well."""
        settings = {"stream": self.name, "batch_size": self.batch_size, "seed": self.seed}
        num_workers = getattr(self.loader, "num_workers", 0)
        return settings | {"number of processes": self.num_shares, "num_workers": num_workers}

    def counts(self, batch_idx: int) -> tuple[int, int]:
        """See ``ShareCounts``."""
        return self.sizes.get(batch_idx, (1, self.num_shares))

    def num_samples_in(self, batch_idx: int) -> int | None:
        """See ``ShareCounts``; batches that come ready are not counted."""
        return super().num_samples_in(batch_idx) if self.batch_size else None

    def __iter__(self) -> Iterator[Any]:
        self.sizes = {}
        first = self.start[1] if self.epoch == self.start[0] else 0
        dataset = getattr(self.loader, "dataset", None)
        if callable(announce := getattr(dataset, "set_epoch", None)):
            announce(self.epoch)
        items = seeded_iteration(self.loader, mix(self.seed, self.epoch))
        batch = END
        for k, item in enumerate(chain(items, repeat(END))):
            if k < first:
                if item is END:
                    raise UserError(
                        f"{self.name} ended after {k} batches, and the run was stopped behind "
                        f"{first}: the data have changed.\nUse the data that the run began with."
                    )
                continue
            here, read = self._with_size(item)
            self.sizes[k] = (here, self._sum(here))
            self.sizes.pop(k - 4, None)  # some batches are read ahead of the one that runs
            if self.seeds_transfer:  # also of the last batch, when the end is read ahead
                seed_generators(mix(self.seed, self.epoch, k, self.rank, 1))
            if self.sizes[k][1] == 0:
                return
            batch = batch if read is END else read
            if batch is END:
                raise UserError(f"{self.name} has no batch for one of {self.num_shares} processes.")
            yield batch

    def _with_size(self, item: Any) -> tuple[int, Any]:
        """Return the number of samples in a batch, which is 0 at the end alone, and the batch."""
        if item is END:
            return 0, END
        if self.batch_size:
            return item  # type: ignore[no-any-return]  # of ``_counted``
        return max(1, extract_batch_size(item)) if self.num_shares > 1 else 1, item

    def _sum(self, number: int) -> int:
        if self.num_shares == 1:
            return number
        self.group = self.group or dist.new_group(backend="gloo")
        total = torch.tensor(number)
        dist.all_reduce(total, group=self.group)
        return int(total)


def share_stream(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int
) -> SharedStream:
    """Let processes read a loader that iterates by itself, or whose data set does."""
    num_ranks, rank = num_processes_and_rank(trainer)
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    data = getattr(loader, "dataset", loader)
    name = f"{name} ({type(data if is_plain else loader).__name__})"
    if split == "train" and trainer.accumulate_grad_batches > 1:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} splits batches, "
            f"and {name} is a stream, whose batches come as they are.\n"
            "Leave it out, and use smaller batches."
        )
    owner = data if hasattr(data, "read_part") else loader
    takes_part = hasattr(owner, "read_part")
    if num_ranks > 1 and not takes_part:
        raise UserError(
            f"{name} is a stream, and each of {num_ranks} processes would read all of it.\n"
            "Give its data set `def read_part(self, part, num_parts)`, which chooses what each "
            "process and worker reads (and does nothing where the stream splits itself), or use "
            "one process."
        )
    num_workers, size = getattr(loader, "num_workers", 0), loader.batch_size if is_plain else None
    if num_ranks > 1 and rank == 0:
        takes = f"{size} samples" if size else f"{num_ranks} of its batches"
        print(
            f"{name} is a stream: each of {num_ranks} processes reads what it gives to it. "
            f"A step takes {takes} in sum, others than one process would take.",
            flush=True,
        )
    elif num_workers > 1 and not takes_part:
        print(f"{name} is a stream: does it split itself between {num_workers} workers?")
    if is_plain:
        batches = {"batch_size": size, "collate_fn": loader.collate_fn}
        if size is not None:
            check_batch_size(size, num_ranks, 1, name)
            low, high = bounds(size, rank, num_ranks)
            batches = {"batch_size": high - low, "drop_last": loader.drop_last}
            batches["collate_fn"] = partial(_counted, loader.collate_fn)
        loader = rebuilt(loader, StreamPart(data, seed, num_ranks, rank), **batches)
    elif takes_part:
        owner.read_part(rank, num_ranks)
    return SharedStream(loader, name, num_ranks, rank, seed, size)
