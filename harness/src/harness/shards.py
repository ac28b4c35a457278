"""Tensors that are split over processes, as torch's ``fully_shard`` leaves them."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a full tensor on its device; if it is split, all processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parted_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Split a full tensor as another one of its shape is split.

    All processes must call this with the same tensor.
    """
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor):
        return tensor
    if tensor.shape != other.shape:
        return tensor  # a counter of steps
    moved = tensor.to(other.device, other.dtype if tensor.is_floating_point() else None)
    return distribute_tensor(moved, other.device_mesh, other.placements)


def has_parts(tensor: Tensor) -> bool:
    """Return whether this process has a part of a tensor only."""
    return isinstance(tensor, DTensor)
