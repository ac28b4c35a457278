"""Gather Python objects of all ranks, from host to host."""

import pickle
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch
import torch.distributed as dist

SMALL = 1024  # bytes of a pickled value that one collective gathers

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
    if not to_first:
        return all_objects(value, group)
    values = [None] * dist.get_world_size(group) if trainer.is_global_zero else None
    dist.gather_object(value, values, 0, group)
    return values or []


def all_objects(value: Any, group: Any) -> list[Any]:
    """Return the value of each rank of a gloo group, as ``dist.all_gather_object`` does.

    torch gathers the sizes first. This function needs one collective if all values are small.
    """
    data = pickle.dumps(value)
    # A value that is too large sends zeros only, and no pickled value begins with a zero.
    padded = (data if len(data) <= SMALL else b"").ljust(SMALL, b"\0")
    own = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, own, group)
    texts = [tensor.numpy().tobytes() for tensor in by_rank]
    if all(text[0] for text in texts):
        return [*map(pickle.loads, texts)]
    values = [None] * len(texts)
    dist.all_gather_object(values, value, group)
    return values
