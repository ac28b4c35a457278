"""The bytes of a tensor in row-major order, a block at a time, whatever its layout in the file."""

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .cast import caster
from .tensors import CheckpointError, Record, Tensor

if TYPE_CHECKING:  # numpy takes 0.1 s and 15 MB, and a plain conversion does not need it
    import numpy.typing as npt

    Array = npt.NDArray[Any]

BLOCK = 1 << 20  # bytes; larger blocks are not faster, smaller ones are slower
_GATHERED = 8 << 20  # bytes gathered at once: of a transposed matrix, the larger the faster
Box = tuple[tuple[int, ...], tuple[int, ...]]  # first element and sizes


def read(record: Record, start: int, num_bytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """Yield bytes [start, start + num_bytes) of a record, in `buffer`, which is reused."""
    position, stop = record.offset + start, record.offset + start + num_bytes
    while position < stop:
        size = min(len(buffer), stop - position)
        if os.preadv(record.fd, [buffer[:size]], position) != size:
            raise CheckpointError("truncated: the file ends in the middle of a tensor")
        yield buffer[:size]
        position += size


def crc32(chunks: Iterable[memoryview]) -> int:
    """Return the checksum of all chunks together."""
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return crc


def stream(tensor: Tensor, dtype: str, buffer: memoryview) -> Iterator[memoryview]:
    """Yield the tensor's elements as `dtype`. Each chunk is gone when the next one is asked for.

    Raises:
        CheckpointError: the file ends early, or a finite value would become infinite.
    """
    if not tensor.numel:
        return iter(())
    if tensor.record and tensor.is_plain:
        start = tensor.offset * tensor.itemsize
        chunks = read(tensor.record, start, tensor.num_bytes, buffer)
    else:
        chunks = _gather(tensor)
    return chunks if dtype == tensor.dtype else map(caster(tensor.dtype, dtype), chunks)


def _gather(tensor: Tensor) -> Iterator[memoryview]:
    """Copy a strided or sharded tensor block by block, so that memory stays bounded."""
    import numpy as np

    element = np.dtype(f"u{tensor.itemsize}" if tensor.itemsize < 16 else "V16")
    parts = tensor.load_shards() if tensor.load_shards else [((0,) * len(tensor.shape), tensor)]
    for first, sizes in _blocks(tensor.shape, tensor.itemsize):
        block = np.empty(sizes, element)
        for position, part in parts:
            overlap = [
                (max(a, p), min(a + n, p + m))
                for a, n, p, m in zip(first, sizes, position, part.shape, strict=True)
            ]
            if all(low < high for low, high in overlap):
                inside = tuple(
                    slice(low - a, high - a) for (low, high), a in zip(overlap, first, strict=True)
                )
                lows = (low - p for (low, _), p in zip(overlap, position, strict=True))
                steps = zip(lows, part.stride, strict=True)
                offset = part.offset + sum(low * step for low, step in steps)
                target = block[inside] if inside else block  # () would copy a number
                _fill(target, part.record, offset, part.stride)
        flat = block.reshape(-1)
        if tensor.negate:
            _negate(flat, tensor)
        content = flat.view(np.uint8).data
        yield from (content[start : start + BLOCK] for start in range(0, len(content), BLOCK))


def _blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Yield boxes of at most _GATHERED bytes that tile the shape in row-major order."""
    axis, inner = len(shape), itemsize
    while axis and inner * shape[axis - 1] <= _GATHERED:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    size, rows, rest = shape[axis - 1], _GATHERED // inner, shape[axis:]
    for lead in itertools.product(*map(range, shape[: axis - 1])):
        for start in range(0, size, rows):
            ones = (1,) * len(lead)
            yield (*lead, start, *(0 for _ in rest)), (*ones, min(rows, size - start), *rest)


def _fill(target: "Array", record: Record | None, offset: int, stride: tuple[int, ...]) -> None:
    """Copy a strided part of a record, reading at most four times the bytes that are wanted."""
    import numpy as np

    assert record is not None
    spans = [(size - 1) * step for size, step in zip(target.shape, stride, strict=True)]
    itemsize, span = target.itemsize, 1 + sum(spans)
    if span * itemsize <= max(4 * target.nbytes, 1 << 14):
        buffer = memoryview(bytearray(span * itemsize))
        (raw,) = read(record, offset * itemsize, len(buffer), buffer)
        steps = [step * itemsize for step in stride]
        source = np.frombuffer(raw, target.dtype)
        target[...] = np.lib.stride_tricks.as_strided(source, target.shape, steps)
        return
    axis = spans.index(max(spans))
    half = target.shape[axis] // 2
    first, second = np.split(target, [half], axis)
    _fill(first, record, offset, stride)
    _fill(second, record, offset + half * stride[axis], stride)


def _negate(flat: "Array", tensor: Tensor) -> None:
    """Apply torch's lazy conj and neg bits: flip signs, in place."""
    parts = 2 if tensor.dtype.startswith("complex") else 1
    numbers = flat.view(f"u{tensor.itemsize // parts}")
    first, step = {"all": (0, 1), "imag": (1, parts), "real": (0, parts)}[tensor.negate]
    numbers[first::step] ^= numbers.dtype.type(1 << (8 * numbers.itemsize - 1))
