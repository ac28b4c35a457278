"""What tells whether a value has changed, from one checkpoint to the next and between processes."""

import pickle
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import torch

from harness.upstream.resume import num_changes

NUM_SAMPLED = 100_000  # elements of an array that is too large to be read


class Summing(pickle.Pickler):
    """Writes checksums in the place of tensors and arrays."""

    def reducer_override(self, obj: Any) -> Any:
        """See Python's own."""
        if isinstance(obj, torch.Tensor):
            return tuple, (("tensor", str(obj.dtype), tuple(obj.shape), tensor_sum(obj)),)
        if isinstance(obj, np.ndarray):
            return tuple, (("array", str(obj.dtype), obj.shape, zlib.crc32(content_of(obj))),)
        return NotImplemented


def content_of(value: Any) -> Any:
    """The bytes of an array or a dense tensor, one after another."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def tensor_sum(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's values."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        file = BytesIO()
        torch.save(tensor, file)
        return zlib.crc32(file.getbuffer())
    return zlib.crc32(content_of(tensor).numpy())


def rough_print(value: Any) -> Any:
    """What tells most changes of a value that is too large to be read at every checkpoint."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.data_ptr(), num_changes(value)
    if isinstance(value, np.ndarray):
        some = value.reshape(-1)[:: max(1, value.size // NUM_SAMPLED)]
        return value.shape, zlib.crc32(content_of(some))
    if hasattr(type(value), "__next__"):
        return object()  # has moved on, for all that is known
    return id(value), len(value) if hasattr(value, "__len__") else None


def fingerprint(node: Any) -> Any:
    """What is equal for equal packed values, also in another process."""
    file = BytesIO()
    pickler = Summing(file, protocol=4)
    pickler.fast = True  # the same texts are written whether they are one object or two
    try:
        pickler.dump(node)
    except (ValueError, RecursionError):  # it holds itself
        file = BytesIO()
        Summing(file, protocol=4).dump(node)
    data = file.getbuffer()
    return bytes(data) if len(data) <= 64 else (len(data), zlib.crc32(data))
