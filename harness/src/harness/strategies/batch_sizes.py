"""How many samples the running batch has, from the sampler that chose them."""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl

from harness.data.sharing import leaves
from harness.data.streams import SharedStream
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
    found = [_size(loader, batch_idx) for loader in _loaders(trainer, *numbers[1:2])]
    return tuple(size for size in found if size) if None not in found else ()


def _loaders(trainer: pl.Trainer, dataloader_idx: int | None = None) -> list[Any]:
    """The loaders whose batches make up the running one."""
    if trainer.predicting:
        loaders = trainer.predict_dataloaders
    else:
        loaders = evaluated(trainer) if trainer.evaluating else trainer.train_dataloader
    if hasattr(loaders, "batch_sampler"):  # one, without a look at collections
        return [loaders]
    found = leaves(loaders)
    return found if dataloader_idx is None else found[dataloader_idx : dataloader_idx + 1]


def _size(loader: Any, batch_idx: int) -> int | None:
    """None where nobody counts, and 0 where the loader gives nothing any more."""
    # For a prediction Lightning wraps the sampler, and keeps what it has drawn.
    seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)
    if seen is not None:
        return len(seen[batch_idx]) if batch_idx < len(seen) else None
    sharing = shares_of(loader)
    if sharing is None or (isinstance(sharing, SharedStream) and not sharing.batch_size):
        return None
    return 0 if sharing.has_ended(batch_idx) else sharing.num_samples_in(batch_idx)
