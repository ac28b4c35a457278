"""Gather Python objects of all ranks, from host to host."""

from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch.distributed as dist

_host_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by default process group


def host_group() -> Any:
    """Return the gloo group of all ranks, which communicates between the hosts."""
    world = dist.group.WORLD
    if world not in _host_groups:
        is_on_host = dist.get_backend() == "gloo"
        _host_groups[world] = None if is_on_host else dist.new_group(backend="gloo")
    return _host_groups[world]


def gather(trainer: pl.Trainer, value: Any, group: Any = None, to_first: bool = False) -> list[Any]:
    """Return the value of each rank of the run or the group. All ranks must call this.

    The values go from host to host, and need no device memory. With ``to_first``, non-zero ranks
    get an empty list.
    """
    if trainer.world_size == 1:
        return [value]
    group = group or host_group()
    values = [None] * dist.get_world_size(group)
    if not to_first:
        dist.all_gather_object(values, value, group)
        return values
    dist.gather_object(value, values if trainer.is_global_zero else None, 0, group)
    return values if trainer.is_global_zero else []
