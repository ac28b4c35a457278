"""Rebuild a ``DataLoader`` with other batches, and list the loaders of a run.

In: a ``DataLoader`` of any class. Out: a loader of the same class and settings; reading from it
does not change the state of the random generators. Next: ``wrap_loaders`` and ``streams`` choose
its batches.
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

from harness.compat.one_rank import seen_as_it_is
from harness.compat.processes import end_where_nothing_is_sent
from harness.data.randomness import END, mix_seed, preserved_generators, seed_generators
from harness.data.shared_batches import SharedBatchSampler
from harness.distributed.shutdown import kill_data_workers, set_up_data_worker
from harness.errors import UserError

atexit.register(kill_data_workers)  # after the imports above, and so before their exit handlers


def start_worker(worker_id: int, then: Callable[[int], object] | None = None) -> None:
    """Prepare a data worker: seed it as Lightning does, and let it end only with its parent.

    ``then`` is the ``worker_init_fn`` of the user's loader.
    """
    pl_worker_init_function(worker_id)
    set_up_data_worker()
    end_where_nothing_is_sent(os._exit)
    if then is not None:
        then(worker_id)


def world_size_and_rank(trainer: pl.Trainer | None) -> tuple[int, int]:
    """Return the number of ranks that split a global batch, and this process's rank."""
    with seen_as_it_is(trainer):
        strategy = getattr(trainer, "strategy", None)
        kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return kwargs.get("num_replicas", 1), kwargs.get("rank", 0)


NEWER = ("in_order", "pin_memory_device")  # arguments that only some versions of torch have


class SharedLoader(DataLoader[Any]):
    """A mixin for rebuilt loaders: it restores the random generators after each batch.

    Without workers, reading a batch seeds the generators that the training step uses as well.
    ``Throughput`` sets ``on_batch_requested`` and ``on_batch_ready``, even during an iteration.
    """

    on_batch_requested: Callable[[], object] = staticmethod(lambda: None)  # before a batch is read
    on_batch_ready: Callable[[], object] = staticmethod(lambda: None)  # after a batch was read
    seeds_transfer = False  # whether to seed the generators for hooks that transfer a batch

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A subclass may have other arguments; ``rebuild_loader`` copies its attributes instead.
        DataLoader.__init__(self, *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Not a generator function: as in DataLoader, iter() must start the workers.
        sampler: Any = getattr(self, "batch_sampler", None)
        if not isinstance(sampler, SharedBatchSampler):  # a stream, or Lightning's own sampler
            return super().__iter__()
        return self._watched(sampler, sampler.next_batch_idx(), super().__iter__())

    def _watched(
        self, sampler: SharedBatchSampler, first: int, batches: Iterator[Any]
    ) -> Iterator[Any]:
        is_seeding, epoch = self.num_workers == 0 and sampler.dataset is not None, sampler.epoch
        for number in count(first):
            self.on_batch_requested()
            with preserved_generators() if is_seeding else nullcontext():
                batch = next(batches, END)
            if self.seeds_transfer:
                seed_generators(mix_seed(sampler.seed, epoch, number, sampler.rank, 1))
            if batch is END:
                return
            if not sampler.was_iterated:
                raise UserError(
                    f"{sampler.name}: {type(self).__name__} does not read its batch_sampler, so "
                    "its batches cannot be split between processes.\nCall super().__iter__() in "
                    "its __iter__, or let the *_dataloader method return an iterable that is not a "
                    "DataLoader."
                )
            self.on_batch_ready()
            yield batch


def rebuild_loader(loader: DataLoader[Any], dataset: Any, **batches: Any) -> SharedLoader:
    """Return a loader of the same class and settings as ``loader``, with other batches."""
    kind, num_workers = type(loader), loader.num_workers
    if kind.__module__.startswith("torchdata."):  # its class would also resume, a second time
        kind = DataLoader
    bases = (SharedLoader,) if kind is DataLoader else (SharedLoader, kind)
    new: SharedLoader = type(kind.__name__, bases, {})(
        dataset=dataset,
        num_workers=num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if num_workers else None,
        # A stream gets new workers in each epoch, as it does in a resumed run.
        persistent_workers=loader.persistent_workers and not isinstance(dataset, IterableDataset),
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=partial(start_worker, then=loader.worker_init_fn) if num_workers else None,
        **{name: getattr(loader, name) for name in NEWER if hasattr(loader, name)},
        **batches,
    )
    for name, value in vars(loader).items():
        vars(new).setdefault(name, value)  # attributes of a subclass
    return new


def flat_loaders(loaders: Any) -> list[Any]:
    """Return a flat list of the loaders in the return value of a ``*_dataloader`` method."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    return list(combined.flattened)
