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
from harness.data.batches import BatchedDataset, bounds
from harness.data.loading import Watched, processes, rebuilt
from harness.data.shared_batches import SharedBatchSampler
from harness.data.stream_parts import Counting, SeededStream
from harness.data.streams import SharedStream
from harness.errors import UserError
from harness.upstream.resume_counters import cycles

LIMITS = {"val": "limit_val_batches", "test": "limit_test_batches"}
LIMITS |= {"predict": "limit_predict_batches"}


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
    if isinstance(loader, (Watched, SharedStream)):
        return loader
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        return loader  # Lightning refuses it with the method's name
    num_ranks, rank = processes(trainer)
    num_micro_batches = int(trainer.accumulate_grad_batches) if split == "train" else 1
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        if num_micro_batches > 1:
            raise UserError(
                f"trainer.accumulate_grad_batches={num_micro_batches} splits batches, and {name} "
                "is a stream, whose batches come as they are.\nLeave it out, and use smaller "
                "batches."
            )
        return share_stream(loader, name, num_ranks, rank, seed)
    batches: Any = loader.batch_sampler
    collate: Any = loader.collate_fn
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
    common: dict[str, Any] = {"num_ranks": num_ranks, "rank": rank, "seed": seed}
    common["dataset"] = None if isinstance(loader.dataset, BatchedDataset) else loader.dataset
    if split == "train":
        if type(batches) is BatchSampler:
            named = name + " with batch_size={size}"
            check_batch_size(batches.batch_size, num_ranks, num_micro_batches, named)
        common |= {"num_micro_batches": num_micro_batches, "cycles": begins_again}
        common["is_fixed"] = bool(trainer.overfit_batches)  # type: ignore[attr-defined]  # set untyped
    else:
        common |= {"in_turn": True, "limit": _limit(trainer, split, batches)}
        # Its forward is collective, so that all processes must have as many batches.
        common["splits_last"] = getattr(trainer.strategy, "strategy_name", "") == "fsdp"
    shared = SharedBatchSampler(batches, kind, **common)
    made = rebuilt(loader, loader.dataset, batch_sampler=shared, collate_fn=collate)
    if not trainer.overfit_batches:  # type: ignore[attr-defined]  # Lightning looks for a fixed order then
        vars(made)["sampler"] = loader.sampler  # to be read; torch forbids to set it
    return made


def share_stream(loader: Any, name: str, num_ranks: int, rank: int, seed: int) -> SharedStream:
    """Let processes read a loader that iterates by itself, or whose data set does.

    Args:
        loader: no ``DataLoader`` with a sampler.
        name: of the method that made it, for messages.
        num_ranks: processes that read it.
        rank: which of them this one is.
        seed: the run's seed.
    """
    how: dict[str, Any] = {"num_ranks": num_ranks, "seed": seed}
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        shared = SharedStream(loader, f"{name} ({type(loader).__name__})", **how)
    else:
        name = f"{name} ({type(loader.dataset).__name__})"
        stream = SeededStream(loader.dataset, seed, num_ranks, rank)  # type: ignore[arg-type]
        batches: dict[str, Any] = {"batch_size": None, "collate_fn": loader.collate_fn}
        if loader.batch_size is not None:
            check_batch_size(loader.batch_size, num_ranks, name=name + " with batch_size={size}")
            low, high = bounds(loader.batch_size, rank, num_ranks)
            batches = {"batch_size": high - low, "drop_last": loader.drop_last}
            batches["collate_fn"] = Counting(loader.collate_fn)
            how["batch_size"] = loader.batch_size
        shared = SharedStream(rebuilt(loader, stream, **batches), name, **how)
    if num_ranks > 1 and rank == 0:
        size = shared.batch_size
        print(
            f"{shared.name} is a stream: each of {num_ranks} processes reads what it gives to it. "
            f"A step takes {f'{size} samples' if size else f'{num_ranks} of its batches'} in sum, "
            "others than one process would take.",
            flush=True,
        )
    return shared


def _limit(trainer: pl.Trainer, split: str, batches: Any) -> int | None:
    """The most batches of an evaluation over all processes.

    Raises:
        UserError: if several processes are to evaluate a fraction, which Lightning would take of
            each one's batches.
    """
    limit = getattr(trainer, LIMITS[split])
    if isinstance(limit, float) and limit not in (0.0, 1.0) and processes(trainer)[0] > 1:
        raise UserError(
            f"trainer.{LIMITS[split]}={limit} is a fraction, which several processes cannot take "
            "exactly.\n"
            f"Use a number of batches: trainer.{LIMITS[split]}={int(len(batches) * limit)}"
        )
    return None if isinstance(limit, float) else limit


def _only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])
