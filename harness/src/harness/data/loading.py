"""What all loaders of a run have in common: workers, who watches them, and who shares them."""

import atexit
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset

from harness.data.randomness import kept_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.processes.leaving import follow_as_worker
from harness.processes.peers import close_inherited
from harness.processes.signals import end_workers, ignore_signals
from harness.upstream.worker_queues import end_where_nothing_is_sent

atexit.register(end_workers)  # after the imports above, and so before their own ends


def collated(batch: Any) -> Any:
    """Return a batch as the data set has collated it."""
    return batch


def start_worker(worker_id: int, then: Callable[[int], object] | None = None) -> None:
    """Prepare a data worker: it is seeded as by Lightning, and ends only with its process.

    Args:
        worker_id: its number.
        then: the ``worker_init_fn`` of the loader's owner.
    """
    pl_worker_init_function(worker_id)
    follow_as_worker()
    ignore_signals()
    close_inherited()
    end_where_nothing_is_sent(os._exit)
    if then is not None:
        then(worker_id)


def processes(trainer: pl.Trainer | None) -> tuple[int, int]:
    """How many processes share a batch, and the rank of this one."""
    kwargs = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None) or {}
    return kwargs.get("num_replicas", 1), kwargs.get("rank", 0)


class Watched(DataLoader[Any]):
    """A mixin for loaders that calls ``when_asked`` and ``when_there`` around each batch.

    The observers set these functions, also while the loader is running. Without workers it
    restores the generators that reading has seeded: dropout draws from the same ones.
    """

    when_asked: Callable[[], object] = staticmethod(lambda: None)
    when_there: Callable[[], object] = staticmethod(lambda: None)
    before_move: Callable[[], object] = staticmethod(lambda: None)  # to the device

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A subclass may have other arguments, and what it makes of them is in its attributes.
        DataLoader.__init__(self, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # This is no generator: workers must start when the iterator is made, as in DataLoader.
        return self._observed(super().__iter__())

    def _observed(self, batches: Iterator[Any]) -> Iterator[Any]:
        sampler = getattr(self, "batch_sampler", None)
        sampler = sampler if isinstance(sampler, SharedBatchSampler) else None
        draws = self.num_workers == 0 and sampler is not None and sampler.dataset is not None
        while True:
            self.when_asked()
            try:
                if draws:
                    with kept_generators():
                        batch = next(batches)
                else:
                    batch = next(batches)
            except StopIteration:
                return
            if sampler is not None and not sampler.is_read:
                raise UserError(
                    f"{sampler.name}: {type(self).__name__} does not read its batch_sampler, so "
                    "processes cannot share its batches.\nLet its __iter__ use super().__iter__(), "
                    "or return an iterable that is no DataLoader."
                )
            self.when_there()
            self.before_move()
            yield batch


def watched(kind: type[DataLoader[Any]]) -> type[Watched]:
    """Make a subclass of a loader's class that is watched."""
    if kind.__module__.startswith("torchdata."):  # it keeps states, which a run has anyway
        kind = DataLoader
    return type(kind.__name__, (Watched,) if kind is DataLoader else (Watched, kind), {})


def rebuilt(loader: DataLoader[Any], dataset: Any, **batches: Any) -> Watched:
    """A loader of the same class and settings as another one, with batches of its own."""
    is_stream = isinstance(dataset, IterableDataset)
    num_workers = loader.num_workers
    made = watched(type(loader))(
        dataset=dataset,
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
    for name, value in vars(loader).items():
        vars(made).setdefault(name, value)  # of its own class
    if isinstance(made.batch_sampler, SharedBatchSampler):
        made.batch_sampler.reads_here = num_workers == 0
    return made
