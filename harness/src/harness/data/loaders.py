"""Rebuilds anybody's loader with other batches, and lists the loaders of a run.

In: a ``DataLoader`` of any class. Out: one of the same class and settings, whose reading leaves the
generators as they were. Next: ``sharing`` and ``streams`` choose its batches.
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
from pytorch_lightning.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from harness.data.randomness import END, mix, preserved_generators, seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.errors import UserError
from harness.processes.leaving import be_data_worker, end_data_workers
from harness.upstream.one_rank import seen_as_it_is
from harness.upstream.processes import end_where_nothing_is_sent

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
    with seen_as_it_is(trainer):
        strategy = getattr(trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
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
