"""Show a world size of 1 to the user's hooks that build data sets, loaders and optimizers.

``batch_size`` is the size of the global batch. So a hook must not use the world size to divide the
batch size, to scale a learning rate, or to plan a schedule. While a hook of ``HOOKS`` runs, the
trainer and ``torch.distributed`` report one rank. Only ``global_rank`` and collectives are those of
the run. ``num_ranks`` and ``num_devices`` return the real numbers.
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
    """Return the real world size, even in a hook to which the Trainer reports one rank."""
    with seen_as_it_is(trainer):
        return trainer.world_size


def num_devices(trainer: pl.Trainer) -> int:
    """Return the real number of devices on all nodes, even in a hook that sees only one."""
    with seen_as_it_is(trainer):
        return trainer.num_devices * trainer.num_nodes


@contextmanager
def seen_as_one_rank(trainer: pl.Trainer) -> Iterator[None]:
    """Report 1 as the world size, and as the number of devices and nodes, in this context.

    The context changes ``world_size``, ``num_devices`` and ``num_nodes`` of the trainer and its
    strategy, ``torch.distributed.get_world_size()`` without a group, and the rank of a
    ``DistributedSampler`` of one replica. A function that user code imported before, by ``from
    torch.distributed import``, stays as it is. So does a run with one rank and one device.
    """
    if num_ranks(trainer) * num_devices(trainer) == 1:
        yield
        return
    with _exchanged(trainer, _as_one_rank, _one_rank_or_group, _sampler_of_any_rank):
        yield


@contextmanager
def seen_as_it_is(trainer: Any) -> Iterator[None]:
    """Report the real numbers to the library within ``seen_as_one_rank``."""
    if not hasattr(type(trainer), "real_class"):
        yield
        return
    with _exchanged(trainer, _real, REAL_WORLD_SIZE, MAKE_SAMPLER):
        yield


@contextmanager
def _exchanged(
    trainer: Any, class_of: Callable[[Any], Any], world_size: Any, make_sampler: Any
) -> Iterator[None]:
    objects = trainer, trainer.strategy
    originals = [type(item) for item in objects], dist.get_world_size, DistributedSampler.__init__
    classes = [class_of(kind) for kind in originals[0]]

    def exchange(classes: list[Any], world_size: Any, make_sampler: Any) -> None:
        for item, kind in zip(objects, classes, strict=True):
            item.__class__ = kind
        dist.get_world_size = world_size
        DistributedSampler.__init__ = make_sampler  # type: ignore[method-assign]

    exchange(classes, world_size, make_sampler)
    try:
        yield
    finally:
        exchange(*originals)


@cache
def _as_one_rank(kind: Any) -> Any:
    """Return a subclass of the same name that reports one rank, node and device."""
    numbers = dict.fromkeys(("world_size", "num_nodes", "num_devices"), property(lambda _: 1))
    attributes = {"real_class": _real(kind), "__module__": kind.__module__}
    return type(kind.__name__, (_real(kind),), numbers | attributes)


def _real(kind: Any) -> Any:
    return getattr(kind, "real_class", kind)


def _one_rank_or_group(group: Any = None) -> int:
    return 1 if group is None else REAL_WORLD_SIZE(group)


def _sampler_of_any_rank(
    sampler: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *args: Any, **how: Any
) -> None:
    """Initialise a ``DistributedSampler``. With one replica, use rank 0: another is refused."""
    rank = 0 if num_replicas in (None, 1) else rank
    MAKE_SAMPLER(sampler, dataset, num_replicas, rank, *args, **how)
