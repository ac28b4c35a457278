"""Gives each process its share of what anybody's loaders give.

In: a ``DataLoader(batch_size=32)``, which means 32 samples per optimizer step over all processes.
Out: a loader of its class, with a ``SharedBatchSampler`` around its batch sampler;
``loader.sampler`` stays the author's. Anything without a sampler becomes a ``SharedStream``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core.hooks import DataHooks
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)

from harness.data.batches import check_batch_size
from harness.data.loaders import SharedLoader, num_processes_and_rank, rebuilt
from harness.data.shared_batches import SharedBatchSampler
from harness.data.streams import SharedStream, share_stream
from harness.errors import UserError
from harness.upstream.resume import cycles


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
        if getattr(loader, "num_workers", 0) > 1 and not getattr(loader, "in_order", True):
            raise UserError(
                f"{name} has in_order=False: its workers give batches in another order each time, "
                "and processes, resumed runs and predictions know a batch by its place.\n"
                "Leave out in_order=False."
            )
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            made: Any = _share_batches(loader, trainer, split, name, seed, begins_again)
        elif isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise UserError(f"{name} returned a data set: return DataLoader(<it>, batch_size=...).")
        elif hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
            made = share_stream(loader, trainer, split, name, seed)
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
        is_round_robin=not is_training,
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
        one: Any = DistributedSampler(loader.dataset, 1, 0, sampler.shuffle, sampler.seed)
        batches = BatchSampler(one, batches.batch_size, batches.drop_last)
    return batches, collate


def _only(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])
