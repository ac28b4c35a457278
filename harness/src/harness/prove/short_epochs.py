"""Epochs of three steps, of which the last is uneven: a few steps show what an epoch's end does."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytorch_lightning as pl
from torch.utils.data import Sampler

from harness.data.shared_batches import SharedBatchSampler
from harness.data.sharing import leaves
from harness.data.streams import SharedStream

STEPS_PER_EPOCH = 3


def uneven(batch_size: int) -> int:
    """A size of about three quarters that neither two nor three processes share evenly."""
    sizes = range(3 * batch_size // 4, batch_size)
    return next((size for size in sizes if size > 3 and size % 2 and size % 3), batch_size)


class FirstBatches(Sampler[Any]):
    """The first batches of a batch sampler, the last of them cut."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.cuts_last = not getattr(batches, "drop_last", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["batches"], name)

    def __len__(self) -> int:
        return min(STEPS_PER_EPOCH, len(self.batches))

    def __iter__(self) -> Iterator[Any]:
        for step, batch in enumerate(self.batches):
            indices = list(batch)
            is_last = step + 1 == STEPS_PER_EPOCH
            yield indices[: uneven(len(indices))] if is_last and self.cuts_last else indices
            if is_last:
                return


def shorten(make: Callable[[], Any], trainer: pl.Trainer) -> Any:
    """Make training loaders whose epochs end after three steps."""
    made = make()
    for loader in leaves(made) if made is not None else ():
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, SharedBatchSampler):
            if not isinstance(sampler.batches, FirstBatches):
                settings = sampler.settings()  # as where a run goes on, whose check comes first
                sampler.settings = partial(dict, settings)  # type: ignore[method-assign]
                sampler.batches = FirstBatches(sampler.batches)
        elif isinstance(loader, SharedStream):
            trainer.limit_train_batches = STEPS_PER_EPOCH
    return made
