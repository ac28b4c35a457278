"""How many samples the running batch has, from the sampler that chose them."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl

from harness.data.batches import Shares
from harness.data.sharing import leaves
from harness.exact.evaluation import evaluated
from harness.exact.global_batches import shares_of


def batch_sizes(trainer: pl.Trainer, step_args: tuple[Any, ...]) -> tuple[int, ...]:
    """The samples that each loader gives to the running step.

    Args:
        trainer: runs the step.
        step_args: what the step is called with: the batch, and its numbers where it takes them.

    Returns:
        Empty if some loader's sampler cannot tell, as that of a stream.
    """
    batch, *numbers = step_args
    if numbers and isinstance(numbers[0], int):
        batch_idx = numbers[0]
    elif trainer.training and not isinstance(batch, Iterator):  # or the step reads the loader
        batch_idx = trainer.fit_loop.batch_idx
    else:
        return ()
    sizes: list[int | None] = []
    for sharing in _shares(trainer, *numbers[1:2]):
        if sharing is None or not sharing.has_ended(batch_idx):
            sizes.append(sharing and samples_in(sharing, batch_idx))
    return tuple(size for size in sizes if size) if all(sizes) else ()


def _shares(trainer: pl.Trainer, dataloader_idx: int | None = None) -> list[Shares | None]:
    """What is known of the loaders whose batches make up the running one."""
    if trainer.predicting:
        loaders = trainer.predict_dataloaders
    else:
        loaders = evaluated(trainer) if trainer.evaluating else trainer.train_dataloader
    if (only := shares_of(loaders)) is not None:  # one loader, without a look at collections
        return [only]
    found = [shares_of(loader) for loader in leaves(loaders)]
    return found if dataloader_idx is None else found[dataloader_idx : dataloader_idx + 1]


def samples_in(sharing: Shares, batch_idx: int) -> int | None:  # until Shares.num_samples is there
    from harness.data.batches import SplitBatches
    from harness.data.shared_batches import SharedBatchSampler

    if isinstance(sharing, SharedBatchSampler) and sharing.in_turn:
        i = batch_idx * sharing.num_ranks + sharing.rank
        return sharing.totals[i + 1] - sharing.totals[i] if i + 1 < len(sharing.totals) else None
    if isinstance(sharing, SplitBatches):
        low, high, _ = sharing._share(batch_idx)
        return high - low
    return None
