"""Stream a tensor's bytes in row-major order, a block at a time, whatever its layout in the file.

In: a Tensor, and the element type to cast to. Out: blocks that conversion.py and write.py copy.
"""

import functools
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .tensors import CheckpointError, Record, Tensor

if TYPE_CHECKING:  # numpy takes 0.1 s and 15 MB, and a plain conversion does not need it
    import numpy.typing as npt

    Array = npt.NDArray[Any]

BLOCK = 1 << 20  # bytes; larger blocks are not faster, smaller ones are slower
_GATHERED = 8 << 20  # bytes gathered at once: of a transposed matrix, the larger the faster
_LEAST = 1 << 18  # bytes that are read at once, however few of them are wanted
_CASTABLE = ("float64", "float32", "float16", "bfloat16")
Sizes = tuple[int, ...]  # or the position of an element


def stream(tensor: Tensor, dtype: str, name: str) -> Iterator[memoryview]:
    """Yield the tensor's elements as `dtype`. Each chunk is gone when the next one is asked for.

    Raises:
        CheckpointError: names the tensor: the file ends early, a finite value would become
            infinite, or the tensor's type has no conversion.
    """
    try:
        if tensor.is_contiguous:
            chunks = read(tensor.record, tensor.offset * tensor.itemsize, tensor.num_bytes)
        else:
            chunks = _gather(tensor)
        if dtype != tensor.dtype and tensor.dtype not in _CASTABLE:
            raise CheckpointError(f"{tensor.dtype} cannot become {dtype}; use --dtype keep")
        cast = functools.partial(_cast, tensor.dtype, dtype)
        yield from chunks if dtype == tensor.dtype else map(cast, chunks)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def check(record: Record, name: str) -> None:
    """Raise a CheckpointError unless a record matches its checksum, if the file states one."""
    if record.crc is not None and record.crc != crc32(read(record, 0, record.num_bytes)):
        raise CheckpointError(f"damaged: {name} does not match its checksum; copy the file again")


def crc32(chunks: Iterable[memoryview]) -> int:
    """Return the checksum of all chunks."""
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return crc


def read(record: Record, start: int, num_bytes: int, block: int = BLOCK) -> Iterator[memoryview]:
    """Yield bytes [start, start + num_bytes) of a record, in a buffer that is used again."""
    buffer = memoryview(bytearray(min(block, num_bytes)))
    position, stop = record.offset + start, record.offset + start + num_bytes
    while position < stop:
        chunk = buffer[: stop - position]
        if os.preadv(record.fd, [chunk], position) != len(chunk):
            raise CheckpointError("truncated: the file ends in the middle of a tensor")
        yield chunk
        position += len(chunk)


def _gather(tensor: Tensor) -> Iterator[memoryview]:
    """Copy a strided tensor block by block, so that memory stays bounded."""
    import numpy as np

    element = np.dtype(f"u{tensor.itemsize}" if tensor.itemsize < 16 else "V16")
    for first, sizes in _blocks((0,) * len(tensor.shape), tensor.shape, tensor.itemsize):
        block = np.empty(sizes, element)
        steps = zip(first, tensor.stride, strict=True)
        offset = tensor.offset + sum(position * step for position, step in steps)
        _fill(block, tensor.record, offset, tensor.stride)
        content = block.reshape(-1).view(np.uint8).data
        yield from (content[start : start + BLOCK] for start in range(0, len(content), BLOCK))


def _blocks(first: Sizes, sizes: Sizes, itemsize: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Cut a box into boxes of at most _GATHERED bytes: yield them in row-major order."""
    num_bytes = math.prod(sizes) * itemsize
    if num_bytes <= _GATHERED:
        yield first, sizes
        return
    axis = next(i for i, size in enumerate(sizes) if size > 1)
    rows = max(1, _GATHERED * sizes[axis] // num_bytes)
    for start in range(0, sizes[axis], rows):
        corner = (*first[:axis], first[axis] + start, *first[axis + 1 :])
        size = min(rows, sizes[axis] - start)
        yield from _blocks(corner, (*sizes[:axis], size, *sizes[axis + 1 :]), itemsize)


def _fill(target: "Array", record: Record, offset: int, stride: Sizes) -> None:
    """Copy a strided part of a record, reading at most four times the bytes that are wanted."""
    import numpy as np

    spans = [(size - 1) * step for size, step in zip(target.shape, stride, strict=True)]
    itemsize, span = target.itemsize, 1 + sum(spans)
    if span * itemsize <= max(4 * target.nbytes, _LEAST):
        num_bytes = span * itemsize
        (raw,) = read(record, offset * itemsize, num_bytes, block=num_bytes)
        steps = [step * itemsize for step in stride]
        source = np.frombuffer(raw, target.dtype)
        target[...] = np.lib.stride_tricks.as_strided(source, target.shape, steps)
        return
    axis = spans.index(max(spans))
    half = target.shape[axis] // 2
    first, second = np.split(target, [half], axis)
    _fill(first, record, offset, stride)
    _fill(second, record, offset + half * stride[axis], stride)


def _cast(source: str, target: str, chunk: memoryview) -> memoryview:
    """Convert a block of floating numbers as torch's `Tensor.to` does; NaNs may get other bits."""
    import numpy as np

    raw = np.frombuffer(chunk, np.uint8)
    if source == "bfloat16":
        values: Array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = raw.view(source)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)  # float64 goes by float32 in torch too
        if target == "bfloat16":
            bits = single.view(np.uint32)
            nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
            bits = np.where(np.isnan(single), bits | 0x400000, nearest_even)
            result: Array = (bits >> 16).astype(np.uint16)
            is_infinite = (result & 0x7FFF) == 0x7F80
        else:
            result = single.astype(target)
            is_infinite = np.isinf(result)
    if np.any(is_infinite & np.isfinite(values)):
        raise CheckpointError(f"a value is too large for {target}; use --dtype keep")
    data: memoryview = result.view(np.uint8).data
    return data
