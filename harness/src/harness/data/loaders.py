"""Rebuilds anybody's loaders so that their batches mean the same under any strategy.

In: a ``DataLoader(batch_size=32)``, which means 32 samples per optimizer step over all processes.
Out: a loader of its class, with a ``SharedBatchSampler`` around its batch sampler;
``loader.sampler`` stays the author's. Anything without a sampler becomes a ``SharedStream``.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.seed import pl_worker_init_function
from pytorch_lightning.core.hooks import DataHooks
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from harness.data.randomness import END, mix, preserved_generators, seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.data.streams import SharedStream, StreamPart
from harness.errors import UserError
from harness.processes.leaving import be_data_worker, end_data_workers
from harness.upstream.processes import end_where_nothing_is_sent
from harness.upstream.resume import cycles

atexit.register(end_data_workers)  # after the imports above, and so before their own ends


def start_worker(worker_id: int, then: Callable[[int], object] | None = None) -> None:
    """Prepare a data worker: it is seeded as by Lightning, and ends only with its process.

    ``then`` is the ``worker_init_fn`` of the loader's owner.
    """
    pl_worker_init_function(worker_id)
    be_data_worker()
    end_where_nothing_is_sent(os._exit)
    if then is not None:
        then(worker_id)


def num_processes_and_rank(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return how many processes share a batch, and the rank of this one."""
    kwargs = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None) or {}
    return kwargs.get("num_replicas", 1), kwargs.get("rank", 0)


NEWER = ("in_order", "pin_memory_device")  # arguments that not every torch has


class SharedLoader(DataLoader[Any]):
    """A mixin for rebuilt loaders, which restores the random numbers around each batch.

    Without workers, reading seeds the generators that a step draws from as well.
    ``Throughput`` sets ``when_asked`` and ``when_there``, also while it iterates.
    """

    when_asked: Callable[[], object] = staticmethod(lambda: None)
    when_there: Callable[[], object] = staticmethod(lambda: None)
    seeds_transfer = False  # seed what a hook draws while the batch is moved to its device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A subclass may have other arguments; ``rebuilt`` copies what it has made of them.
        DataLoader.__init__(self, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # This is no generator: workers must start when the iterator is made, as in DataLoader.
        sampler: Any = getattr(self, "batch_sampler", None)
        if not isinstance(sampler, SharedBatchSampler):  # a stream, or Lightning's for predictions
            return super().__iter__()
        return self._watched(sampler, sampler.next_batch_idx(), super().__iter__())

    def _watched(
        self, sampler: SharedBatchSampler, first: int, batches: Iterator[Any]
    ) -> Iterator[Any]:
        is_seeding, epoch = self.num_workers == 0 and sampler.dataset is not None, sampler.epoch
        for number in count(first):
            self.when_asked()
            with preserved_generators() if is_seeding else nullcontext():
                batch = next(batches, END)
            if self.seeds_transfer:
                seed_generators(mix(sampler.seed, epoch, number, sampler.rank, 1))
            if batch is END:
                return
            if not sampler.is_read:
                raise UserError(
                    f"{sampler.name}: {type(self).__name__} does not read its batch_sampler, so "
                    "processes cannot share its batches.\nLet its __iter__ use super().__iter__(), "
                    "or return an iterable that is no DataLoader."
                )
            self.when_there()
            yield batch


def rebuilt(loader: DataLoader[Any], dataset: Any, **batches: Any) -> SharedLoader:
    """Make a loader of the same class and settings as another one, with batches of its own."""
    kind, num_workers = type(loader), loader.num_workers
    if kind.__module__.startswith("torchdata."):  # it would go on by itself, after our sampler
        kind = DataLoader
    bases = (SharedLoader,) if kind is DataLoader else (SharedLoader, kind)
    made: SharedLoader = type(kind.__name__, bases, {})(
        dataset=dataset,
        num_workers=num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if num_workers else None,
        # Workers of a stream begin anew, as those of a run that goes on do.
        persistent_workers=loader.persistent_workers and not isinstance(dataset, IterableDataset),
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=partial(start_worker, then=loader.worker_init_fn) if num_workers else None,
        **{name: getattr(loader, name) for name in NEWER if hasattr(loader, name)},
        **batches,
    )
    for name, value in vars(loader).items():
        vars(made).setdefault(name, value)  # of its own class
    return made


def leaves(loaders: Any) -> list[Any]:
    """List the single loaders of what a ``*_dataloader`` method may return."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)


def share(loaders: Any, trainer: pl.Trainer, split: str, name: str, seed: int) -> Any:
    """Replace each loader, of the method ``name``, by one that gives this process its share.

    Raises:
        UserError: where a process would have no share.
    """
    is_combined = isinstance(loaders, CombinedLoader)
    combined = loaders if is_combined else CombinedLoader(loaders)
    begins_again = not is_combined or cycles(loaders)
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    hooks = ("on_before_batch_transfer", "on_after_batch_transfer")
    has_hook = any(is_overridden(hook, owner, DataHooks) for owner in owners for hook in hooks)

    def shared(loader: Any) -> Any:
        if isinstance(loader, (SharedLoader, SharedStream)):
            return loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            made: Any = _share_batches(loader, trainer, split, name, seed, begins_again)
        elif isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise UserError(f"{name} returned a data set: return DataLoader(<it>, batch_size=...).")
        elif hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
            made = _share_stream(loader, trainer, split, name, seed)
        else:
            return loader  # Lightning refuses what cannot be iterated, with the method's name
        made.seeds_transfer = has_hook and split == "train"
        return made

    combined.flattened = [shared(loader) for loader in combined.flattened]
    return combined if is_combined else combined.iterables


def _share_batches(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int, begins_again: bool
) -> SharedLoader:
    """Rebuild a loader whose data set has a length."""
    num_ranks, rank = num_processes_and_rank(trainer)
    is_training = split == "train"
    num_micro_batches = int(trainer.accumulate_grad_batches) if is_training else 1
    batches, collate = _batches_of(loader, name, is_training and num_ranks * num_micro_batches > 1)
    is_stock = type(batches) is BatchSampler
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)  # the author's
    if is_training and is_stock:
        check_batch_size(batches.batch_size, num_ranks, num_micro_batches, name)
    limit = None if is_training else getattr(trainer, f"limit_{split}_batches")
    if limit not in (None, 0.0, 1.0) and not isinstance(limit, int) and num_ranks > 1:
        raise UserError(  # Lightning would take it of each process's batches
            f"trainer.limit_{split}_batches={limit} is a fraction, which several processes cannot "
            "take exactly.\nUse a number of batches: "
            f"trainer.limit_{split}_batches={int(len(batches) * limit)}"
        )
    is_fixed = bool(trainer.overfit_batches)  # type: ignore[attr-defined]  # set untyped
    shared = SharedBatchSampler(
        batches,
        f"{name} ({type(sampler if is_stock else batches).__name__})",
        dataset=loader.dataset,
        num_ranks=num_ranks,
        rank=rank,
        num_micro_batches=num_micro_batches,
        seed=seed,
        in_turn=not is_training,
        # fsdp's forward is collective, so all processes must have as many batches.
        splits_last=getattr(trainer.strategy, "strategy_name", "") == "fsdp",
        limit=limit if isinstance(limit, int) else None,
        is_fixed=is_fixed,
        cycles=begins_again,
        reads_here=loader.num_workers == 0,
    )
    made = rebuilt(loader, loader.dataset, batch_sampler=shared, collate_fn=collate)
    if not is_fixed:  # else Lightning wants to see a SequentialSampler
        vars(made)["sampler"] = loader.sampler  # to be read; torch forbids to set it
    return made


def _batches_of(loader: Any, name: str, is_shared: bool) -> tuple[Any, Any]:
    """Return the batch sampler that draws global batches, and the function that collates them."""
    batches, collate = loader.batch_sampler, loader.collate_fn
    if batches is None:  # the data set gives whole batches
        if is_shared:
            raise UserError(
                f"{name} has batch_size=None: batches that the data set has made cannot be shared "
                "by processes.\nGive the DataLoader a batch_size, or use one process."
            )
        batches, collate = BatchSampler(loader.sampler, 1, False), partial(_only, collate)
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        # The harness shares the batches instead.
        if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            raise UserError(
                f"{name}: {type(sampler).__name__} shares samples itself, and the harness shares "
                "batches.\nGive the DataLoader the sampler that one process would have."
            )
        data: Any = loader.dataset
        one = RandomSampler(data) if sampler.shuffle else SequentialSampler(data)
        batches = BatchSampler(one, batches.batch_size, batches.drop_last)
    return batches, collate


def _only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])


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


def _share_stream(
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
        if size is not None:
            check_batch_size(size, num_ranks, 1, name)
        part = StreamPart(data, seed, num_ranks, rank)
        loader = rebuilt(loader, part, **part.batches(loader))
    elif takes_part:
        owner.read_part(rank, num_ranks)
    return SharedStream(loader, name, num_ranks, rank, seed, size)
