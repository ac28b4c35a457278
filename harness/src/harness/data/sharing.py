"""Loaders of anybody's making, taken over so that their batches mean the same under any strategy.

``DataLoader(batch_size=32)`` gives 32 samples per optimizer step over all processes, whoever has
made it. Loaders of ``harness.DataModule`` do so by themselves and stay as they are.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from harness.data.batch_size import check_batch_size
from harness.data.batches import BatchedDataset, Shares, bounds
from harness.data.loading import identity, processes, start_worker
from harness.data.measuring import WatchedLoader
from harness.data.seeded_samples import SeededSamples
from harness.data.shared_batches import SharedBatchSampler, evaluation_batches
from harness.data.stream_parts import Counting, SeededStream, splits_twice
from harness.data.streams import SharedStream
from harness.errors import UserError
from harness.upstream.resume_counters import cycles

log = logging.getLogger(__name__)

# What a subclass of DataLoader may define without iterating in another way.
HARMLESS = {"__init__", "__len__", "__repr__", "__doc__", "__module__", "__annotations__"}
HARMLESS |= {"__parameters__", "__orig_bases__", "__dict__", "__weakref__", "__firstlineno__"}
HARMLESS |= {"__static_attributes__", "__type_params__"}


def leaves(loaders: Any) -> list[Any]:
    """The single loaders of what a ``*_dataloader`` method may return."""
    if isinstance(loaders, CombinedLoader):
        return list(loaders.flattened)
    return list(CombinedLoader(loaders).flattened)


def share(loaders: Any, trainer: pl.Trainer, split: str, name: str, seed: int) -> Any:
    """Replace each loader of a collection by one that gives this process its share.

    Args:
        loaders: a loader, or a collection of them, as Lightning takes it.
        trainer: knows the processes, and what is accumulated.
        split: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        name: of the method that made them, for messages.
        seed: the run's seed.

    Raises:
        UserError: where a process would have no share.
    """
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    begins_again = not isinstance(loaders, CombinedLoader) or cycles(loaders)
    combined.flattened = [
        _share_one(loader, trainer, split, name, seed, begins_again)
        for loader in combined.flattened
    ]
    return combined if isinstance(loaders, CombinedLoader) else combined.iterables


def _share_one(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int, begins_again: bool
) -> Any:
    if isinstance(loader, Shares) or isinstance(getattr(loader, "batch_sampler", None), Shares):
        return loader
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        return loader  # Lightning refuses it with the method's name
    num_ranks, rank = processes(trainer)
    num_micro_batches = int(trainer.accumulate_grad_batches) if split == "train" else 1
    shared: Any
    if not is_plain(loader) or isinstance(loader.dataset, IterableDataset):
        _check_accumulation(name, num_micro_batches)
        shared = _share_stream(loader, name, num_ranks, rank, seed)
        if num_ranks > 1 and rank == 0:
            size = (
                f"{shared.batch_size} samples"
                if shared.batch_size
                else f"{num_ranks} of its batches"
            )
            print(
                f"{shared.name} is a stream: each of {num_ranks} processes reads what it gives to "
                f"it. A step takes {size} in sum, others than one process would take.",
                flush=True,
            )
        return shared
    batches, collate = loader.batch_sampler, loader.collate_fn
    if batches is None:  # the data set gives batches that are made
        batches, collate = BatchSampler(loader.sampler, 1, False), partial(_only, collate)
        if split == "train" and num_ranks * num_micro_batches > 1:
            raise UserError(
                f"{name} has batch_size=None: batches that the data set has made cannot be shared "
                "by processes.\nGive the DataLoader a batch_size, or use one process."
            )
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):  # the harness shares the batches instead
        dataset: Any = loader.dataset
        one = RandomSampler(dataset) if sampler.shuffle else SequentialSampler(dataset)
        batches = BatchSampler(one, batches.batch_size, batches.drop_last)
    kind = f"{name} ({type(sampler if type(batches) is BatchSampler else batches).__name__})"
    if split != "train":
        shared = evaluation_batches(batches, kind, trainer, split, seed)
    else:
        if type(batches) is BatchSampler:
            named = name + " with batch_size={size}"
            check_batch_size(batches.batch_size, num_ranks, num_micro_batches, named)
        shared = SharedBatchSampler(
            batches,
            kind,
            num_ranks=num_ranks,
            rank=rank,
            num_micro_batches=num_micro_batches,
            seed=seed,
            is_fixed=bool(trainer.overfit_batches),  # type: ignore[attr-defined]  # set untyped
            cycles=begins_again,
        )
    dataset = loader.dataset
    if isinstance(dataset, BatchedDataset):
        return rebuilt(loader, dataset, batch_sampler=shared, collate_fn=collate)
    samples = SeededSamples(dataset, seed, collate)
    return rebuilt(loader, samples, batch_sampler=shared, collate_fn=identity)


def _share_stream(loader: Any, name: str, num_ranks: int, rank: int, seed: int) -> SharedStream:
    if not is_plain(loader):
        name = f"{name} ({type(loader).__name__})"
        return SharedStream(loader, name, num_ranks=num_ranks, seed=seed)
    name = f"{name} ({type(loader.dataset).__name__})"
    if splits_twice(loader.dataset) and rank == 0:
        log.warning(
            "%s has read_part, and asks for its rank or worker as well: what it splits by these "
            "once more is left out of every epoch.",
            name,
        )
    stream = SeededStream(loader.dataset, seed, num_ranks, rank)
    size = loader.batch_size
    if size is None:
        mine = rebuilt(loader, stream, batch_size=None, collate_fn=loader.collate_fn)
        return SharedStream(mine, name, num_ranks=num_ranks, seed=seed)
    check_batch_size(size, num_ranks, name=name + " with batch_size={size}")
    low, high = bounds(size, rank, num_ranks)
    batches = {"batch_size": high - low, "drop_last": loader.drop_last}
    mine = rebuilt(loader, stream, **batches, collate_fn=Counting(loader.collate_fn))
    return SharedStream(
        mine, name, num_ranks=num_ranks, seed=seed, batch_size=size, is_counted=True
    )


def is_plain(loader: Any) -> bool:
    """Whether a loader iterates as ``DataLoader`` does, whatever its class."""
    if not isinstance(loader, DataLoader):
        return False
    bases = type(loader).__mro__[: type(loader).__mro__.index(DataLoader)]
    of_torch = ("torchdata.", "harness.")  # they keep states, or watch
    own = {
        name for base in bases if not base.__module__.startswith(of_torch) for name in vars(base)
    }
    return not {name for name in own if hasattr(DataLoader, name)} - HARMLESS


def rebuilt(loader: DataLoader[Any], dataset: Any, **batches: Any) -> WatchedLoader:
    """A loader with the settings of another one, and batches of its own."""
    is_stream = isinstance(dataset, IterableDataset)
    num_workers = loader.num_workers
    return WatchedLoader(
        dataset,
        num_workers=num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if num_workers else None,
        # Workers of a stream begin anew, as those of a run that goes on do.
        persistent_workers=loader.persistent_workers and not is_stream,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=partial(start_worker, then=loader.worker_init_fn) if num_workers else None,
        **batches,
    )


def _check_accumulation(name: str, num_micro_batches: int) -> None:
    if num_micro_batches > 1:
        raise UserError(
            f"trainer.accumulate_grad_batches={num_micro_batches} splits batches, and {name} is a "
            "stream, whose batches come as they are.\nLeave it out, and use smaller batches."
        )


def _only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])
