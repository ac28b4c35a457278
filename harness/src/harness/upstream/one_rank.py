"""Let the user's code that builds data sets, loaders and optimizers see a world size of 1.

A batch size is that of an optimizer step over all ranks, so code that divides it by the world size,
multiplies a learning rate by it, or plans a schedule with it would make another experiment. In: the
trainer, while a hook of ``HOOKS`` runs. Out: the same calls as on one rank; only ``global_rank``
and collectives are those of the run. ``num_ranks`` and ``num_devices`` are the real numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytorch_lightning as pl
import torch.distributed as dist
from torch.utils.data import DistributedSampler

SPLITS = ("train", "val", "test", "predict")
HOOKS = ("setup", "configure_optimizers", *(f"{split}_dataloader" for split in SPLITS))
REAL_WORLD_SIZE = dist.get_world_size
MAKE_SAMPLER = DistributedSampler.__init__


def num_ranks(trainer: pl.Trainer) -> int:
    """Return the number of processes that share a batch, also in a hook that sees one."""
    with seen_as_it_is(trainer):
        return trainer.world_size


def num_devices(trainer: pl.Trainer) -> int:
    """Return the number of devices on all nodes, also in a hook that sees one."""
    with seen_as_it_is(trainer):
        return trainer.num_devices * trainer.num_nodes


@contextmanager
def seen_as_one_rank(trainer: pl.Trainer) -> Iterator[None]:
    """Let the world size, and the numbers of devices and nodes, be 1 meanwhile.

    It changes ``world_size``, ``num_devices`` and ``num_nodes`` of the trainer and its strategy,
    ``torch.distributed.get_world_size()`` without a group, and the rank of a ``DistributedSampler``
    of one replica. A function that was imported by ``from torch.distributed import`` stays as it
    is. Nothing changes where the run has one rank and one device.
    """
    if num_ranks(trainer) * num_devices(trainer) == 1:
        yield
        return
    with _exchanged(trainer, _as_one_rank, _one_rank_or_group, _sampler_of_any_rank):
        yield


@contextmanager
def seen_as_it_is(trainer: Any) -> Iterator[None]:
    """Show what the library calls within such a hook the real numbers."""
    if not hasattr(type(trainer), "real_class"):
        yield
        return
    with _exchanged(trainer, _real, REAL_WORLD_SIZE, MAKE_SAMPLER):
        yield


@contextmanager
def _exchanged(
    trainer: Any, class_of: Callable[[Any], Any], world_size: Any, make_sampler: Any
) -> Iterator[None]:
    owners = trainer, trainer.strategy
    before = [type(owner) for owner in owners], dist.get_world_size, DistributedSampler.__init__
    classes = [class_of(kind) for kind in before[0]]

    def exchange(classes: list[Any], world_size: Any, make_sampler: Any) -> None:
        for owner, kind in zip(owners, classes, strict=True):
            owner.__class__ = kind
        dist.get_world_size = world_size
        DistributedSampler.__init__ = make_sampler  # type: ignore[method-assign]

    exchange(classes, world_size, make_sampler)
    try:
        yield
    finally:
        exchange(*before)


@cache
def _as_one_rank(kind: Any) -> Any:
    """Return a subclass of the same name whose numbers are 1."""
    numbers = dict.fromkeys(("world_size", "num_nodes", "num_devices"), property(lambda _: 1))
    known = {"real_class": _real(kind), "__module__": kind.__module__}
    return type(kind.__name__, (_real(kind),), numbers | known)


def _real(kind: Any) -> Any:
    return getattr(kind, "real_class", kind)


def _one_rank_or_group(group: Any = None) -> int:
    return 1 if group is None else REAL_WORLD_SIZE(group)


def _sampler_of_any_rank(
    sampler: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *args: Any, **how: Any
) -> None:
    """Make a ``DistributedSampler``, which refuses rank 1 of 1."""
    rank = 0 if num_replicas in (None, 1) else rank
    MAKE_SAMPLER(sampler, dataset, num_replicas, rank, *args, **how)
