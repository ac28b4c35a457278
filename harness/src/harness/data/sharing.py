"""Loaders of anybody's making, rebuilt so that their batches mean the same under any strategy.

``DataLoader(batch_size=32)`` gives 32 samples per optimizer step over all processes, whoever has
made it. Each loader with a sampler is made again, of its own class, with a ``SharedBatchSampler``
around its batch sampler; ``loader.sampler`` stays the author's. Everything else is a stream.
"""

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
from harness.data.batches import bounds
from harness.data.loading import Watched, processes, rebuilt
from harness.data.shared_batches import SharedBatchSampler
from harness.data.stream_parts import Counting, SeededStream
from harness.data.streams import SharedStream
from harness.errors import UserError
from harness.upstream.resume_counters import cycles


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
    shared = []
    for loader in combined.flattened:
        if isinstance(loader, (Watched, SharedStream)):
            pass
        elif not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            # Lightning refuses what cannot be iterated, with the method's name.
            if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
                loader = _share_stream(loader, trainer, split, name, seed)
        else:
            loader = _share_one(loader, trainer, split, name, seed, begins_again)
        shared.append(loader)
    combined.flattened = shared
    return combined if isinstance(loaders, CombinedLoader) else combined.iterables


def _share_one(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int, begins_again: bool
) -> Watched:
    """Rebuild a loader whose data set has a length."""
    num_ranks, rank = processes(trainer)
    is_training = split == "train"
    num_micro_batches = int(trainer.accumulate_grad_batches) if is_training else 1
    batches, collate = loader.batch_sampler, loader.collate_fn
    if batches is None:  # the data set gives batches that are made
        batches, collate = BatchSampler(loader.sampler, 1, False), partial(_only, collate)
        if is_training and num_ranks * num_micro_batches > 1:
            raise UserError(
                f"{name} has batch_size=None: batches that the data set has made cannot be shared "
                "by processes.\nGive the DataLoader a batch_size, or use one process."
            )
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):  # the harness shares the batches instead
        data: Any = loader.dataset
        one = RandomSampler(data) if sampler.shuffle else SequentialSampler(data)
        batches = BatchSampler(one, batches.batch_size, batches.drop_last)
    is_stock = type(batches) is BatchSampler
    if is_training and is_stock:
        named = name + " with batch_size={size}"
        check_batch_size(batches.batch_size, num_ranks, num_micro_batches, named)
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
        # Its forward is collective, so that all processes must have as many batches.
        splits_last=getattr(trainer.strategy, "strategy_name", "") == "fsdp",
        limit=None if is_training else _limit(trainer, split, batches),
        is_fixed=is_fixed,
        cycles=begins_again,
    )
    made = rebuilt(loader, loader.dataset, batch_sampler=shared, collate_fn=collate)
    if not is_fixed:  # Lightning looks for a fixed order then
        vars(made)["sampler"] = loader.sampler  # to be read; torch forbids to set it
    return made


def _share_stream(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int
) -> SharedStream:
    """Let processes read a loader that iterates by itself, or whose data set does."""
    num_ranks, rank = processes(trainer)
    if split == "train" and trainer.accumulate_grad_batches > 1:
        raise UserError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} splits batches, "
            f"and {name} is a stream, whose batches come as they are.\n"
            "Leave it out, and use smaller batches."
        )
    size = None
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        name = f"{name} ({type(loader).__name__})"
    else:
        name, size = f"{name} ({type(loader.dataset).__name__})", loader.batch_size
        batches: dict[str, Any] = {"batch_size": None, "collate_fn": loader.collate_fn}
        if size is not None:
            check_batch_size(size, num_ranks, name=name + " with batch_size={size}")
            low, high = bounds(size, rank, num_ranks)
            batches = {"batch_size": high - low, "drop_last": loader.drop_last}
            batches["collate_fn"] = Counting(loader.collate_fn)
        stream: Any = SeededStream(loader.dataset, seed, num_ranks, rank)  # type: ignore[arg-type]
        loader = rebuilt(loader, stream, **batches)
    if num_ranks > 1 and rank == 0:
        print(
            f"{name} is a stream: each of {num_ranks} processes reads what it gives to it. "
            f"A step takes {f'{size} samples' if size else f'{num_ranks} of its batches'} in sum, "
            "others than one process would take.",
            flush=True,
        )
    return SharedStream(loader, name, num_ranks=num_ranks, seed=seed, batch_size=size)


def _limit(trainer: pl.Trainer, split: str, batches: Any) -> int | None:
    """The most batches of an evaluation over all processes.

    Raises:
        UserError: if several processes are to evaluate a fraction, which Lightning would take of
            each one's batches.
    """
    limit = getattr(trainer, f"limit_{split}_batches")
    if isinstance(limit, int):
        return limit
    if limit not in (0.0, 1.0) and processes(trainer)[0] > 1:
        raise UserError(
            f"trainer.limit_{split}_batches={limit} is a fraction, which several processes cannot "
            "take exactly.\nUse a number of batches: "
            f"trainer.limit_{split}_batches={int(len(batches) * limit)}"
        )
    return None


def _only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])
