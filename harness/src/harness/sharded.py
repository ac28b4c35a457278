"""Tensors that are sharded over the ranks, as by torch's ``fully_shard``."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, on its device. All ranks must call this for a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a full tensor, sharded like ``other`` if ``other`` is sharded and has the same shape.

    All ranks must call this with the same tensor.
    """
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor):
        return tensor
    if tensor.shape != other.shape:
        return tensor  # for example, the step counter of an optimizer
    moved = tensor.to(other.device, other.dtype if tensor.is_floating_point() else None)
    return distribute_tensor(moved, other.device_mesh, other.placements)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank has only a shard of a tensor."""
    return isinstance(tensor, DTensor)
