"""Tensors of which each process has a part, as torch's ``fully_shard`` leaves them."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on its device; of one that has parts, all processes call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parted_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This process's part of a whole tensor, as another of its shape has its own.

    All processes call it with the same tensor.
    """
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor):
        return tensor
    if tensor.shape != other.shape:
        return tensor  # a counter of steps
    moved = tensor.to(other.device, other.dtype if tensor.is_floating_point() else None)
    return distribute_tensor(moved, other.device_mesh, other.placements)


def has_parts(tensor: Tensor) -> bool:
    """Whether this process has a part of a tensor."""
    return isinstance(tensor, DTensor)
