"""Wrap the user's loaders, so that the ranks share the batches of a single process.

In training, each rank gets its local batch of every global batch. In an evaluation, the ranks read
whole batches in turn.

In: a ``DataLoader(batch_size=32)``, which means 32 samples per optimizer step over all ranks.
Out: a loader of the same class, with a ``SharedBatchSampler`` around its batch sampler.
``loader.sampler`` stays the user's sampler. A loader without a sampler becomes a ``SharedStream``.
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
    Subset,
    TensorDataset,
    default_collate,
)

from harness.compat.resume import restarts_shorter_loaders
from harness.data.batches import check_batch_size
from harness.data.loaders import SharedLoader, rebuild_loader, world_size_and_rank
from harness.data.shared_batches import SharedBatchSampler
from harness.data.streams import SharedStream, share_stream
from harness.errors import UserError


def wrap_loaders(loaders: Any, trainer: pl.Trainer, split: str, name: str, seed: int) -> Any:
    """Replace the loaders that the method ``name`` returned by loaders that yield local batches.

    Raises:
        UserError: if the batches cannot be split between the ranks.
    """
    is_combined = isinstance(loaders, CombinedLoader)
    combined = loaders if is_combined else CombinedLoader(loaders)
    may_cycle = not is_combined or restarts_shorter_loaders(loaders)
    modules = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    hooks = ("on_before_batch_transfer", "on_after_batch_transfer")
    has_hook = any(is_overridden(hook, module, DataHooks) for module in modules for hook in hooks)

    def wrap(loader: Any) -> Any:
        if isinstance(loader, (SharedLoader, SharedStream)):
            return loader
        if getattr(loader, "num_workers", 0) > 1 and not getattr(loader, "in_order", True):
            raise UserError(
                f"{name} has in_order=False: its workers yield batches in another order each time, "
                "but ranks, resumed runs and predictions identify a batch by its position.\n"
                "Leave out in_order=False."
            )
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            wrapped: Any = _wrap_map_loader(loader, trainer, split, name, seed, may_cycle)
        elif isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise UserError(
                f"{name} returned a data set. Return DataLoader(<the data set>, batch_size=...)."
            )
        elif hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
            wrapped = share_stream(loader, trainer, split, name, seed)
        else:
            return loader  # not iterable: Lightning raises an error with the method's name
        wrapped.seeds_transfer = has_hook and split == "train"
        return wrapped

    combined.flattened = [wrap(loader) for loader in combined.flattened]
    return combined if is_combined else combined.iterables


def _wrap_map_loader(
    loader: Any, trainer: pl.Trainer, split: str, name: str, seed: int, may_cycle: bool
) -> SharedLoader:
    """Return a loader that gives this rank its local batch of each global batch."""
    num_ranks, rank = world_size_and_rank(trainer)
    is_training = split == "train"
    num_micro_batches = int(trainer.accumulate_grad_batches) if is_training else 1
    batches, collate = _batches_of(loader, name, is_training and num_ranks * num_micro_batches > 1)
    is_stock = type(batches) is BatchSampler
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)  # the user's
    if is_training and is_stock:
        check_batch_size(batches.batch_size, num_ranks, num_micro_batches, name)
    limit = None if is_training else getattr(trainer, f"limit_{split}_batches")
    if limit not in (None, 0.0, 1.0) and not isinstance(limit, int) and num_ranks > 1:
        raise UserError(  # Lightning would apply it to each rank's batches
            f"trainer.limit_{split}_batches={limit} is a fraction, which {num_ranks} processes "
            "cannot apply exactly.\nUse a number of batches: "
            f"trainer.limit_{split}_batches={int(len(batches) * limit)}"
        )
    is_fixed = bool(trainer.overfit_batches)  # type: ignore[attr-defined]  # set untyped
    shared = SharedBatchSampler(
        batches,
        f"{name} ({type(sampler if is_stock else batches).__name__})",
        dataset=None if draws_nothing(loader) else loader.dataset,
        num_ranks=num_ranks,
        rank=rank,
        num_micro_batches=num_micro_batches,
        seed=seed,
        is_round_robin=not is_training,
        # With fsdp, forward is a collective operation: all ranks need equally many batches.
        splits_last=getattr(trainer.strategy, "strategy_name", "") == "fsdp",
        limit=limit if isinstance(limit, int) else None,
        is_fixed=is_fixed,
        cycles=may_cycle,
        reads_here=loader.num_workers == 0,
    )
    wrapped = rebuild_loader(loader, loader.dataset, batch_sampler=shared, collate_fn=collate)
    if not is_fixed:  # with overfit_batches, Lightning requires a SequentialSampler
        vars(wrapped)["sampler"] = loader.sampler  # for user code; torch forbids an assignment
    return wrapped


def draws_nothing(loader: Any) -> bool:
    """Return whether only code of torch reads the samples, which draws no random numbers.

    Such samples need no seed. A seed takes ten microseconds, and to read such a sample takes less.
    """
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_stock = type(dataset) is TensorDataset and type(loader) is DataLoader
    return is_stock and loader.collate_fn is default_collate


def _batches_of(loader: Any, name: str, is_split: bool) -> tuple[Any, Any]:
    """Return the batch sampler that draws the global batches, and their collate function."""
    batches, collate = loader.batch_sampler, loader.collate_fn
    if batches is None:  # the data set returns whole batches
        if is_split:
            raise UserError(
                f"{name} has batch_size=None: the data set returns whole batches, which cannot be "
                "split between processes or accumulated batches.\n"
                "Give the DataLoader a batch_size, or use one process."
            )
        batches, collate = BatchSampler(loader.sampler, 1, False), partial(_collate_first, collate)
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        # The library splits the batches instead.
        if type(sampler) is not DistributedSampler or type(batches) is not BatchSampler:
            raise UserError(
                f"{name}: {type(sampler).__name__} splits the samples between processes, but the "
                "library already splits the batches.\nGive the DataLoader the sampler that you "
                "use with one process."
            )
        undivided: Any = DistributedSampler(loader.dataset, 1, 0, sampler.shuffle, sampler.seed)
        batches = BatchSampler(undivided, batches.batch_size, batches.drop_last)
    return batches, collate


def _collate_first(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    return collate(samples[0])
