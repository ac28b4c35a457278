"""Describe tensors as bytes of files, read these bytes, and limit the cost of a damaged file.

A ``ByteRange`` is a range of bytes in an open file. A ``StoredTensor`` is a strided view of such a
range. ``stream`` yields its elements in row-major order, block by block. checkpoint.py and
unpickle.py make objects of both classes; conversion.py and write.py copy the blocks.
"""

import errno
import itertools
import math
import operator
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import UserError

if TYPE_CHECKING:  # numpy takes 0.1 s and 15 MB, and most conversions do not need it
    import numpy.typing as npt

BLOCK = 1 << 20  # bytes; larger blocks are not faster, smaller ones are slower
_MAX_GATHERED = 8 << 20  # bytes gathered at once; more is faster for a transposed matrix
_MIN_READ = 1 << 18  # bytes; a smaller span is read at once, even for a few elements
_MAX_AXES = 64
Sizes = tuple[int, ...]  # one number per axis: a shape, strides, or an element's position


class CheckpointError(UserError):
    """The input is no checkpoint, is damaged, or holds an object that cannot be converted."""


@contextmanager
def parsing() -> Iterator[None]:
    """Turn any exception in the block into a CheckpointError: damaged bytes can raise any."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file may contain an offset that no file can have: the system raises EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise CheckpointError(f"damaged or truncated ({type(error).__name__})") from error


class Budget:
    """A limit on the objects that are built from a file: each costs bytes of the file.

    A pickle of a few bytes can repeat earlier objects without end. An undamaged file has several
    times as many bytes for each object as the object costs.
    """

    OPCODE = 4
    CONTAINER = 20  # of JSON: a list or dict
    NAME, PART = 50, 16  # a tensor's name, and each part of it between dots

    def __init__(self) -> None:
        self.left = 2_000_000

    def spend(self, amount: int) -> None:
        """Pay for objects; raise a CheckpointError if the file has too few bytes left."""
        self.left -= amount
        if self.left < 0:
            raise CheckpointError("damaged: it holds more objects than a file of its size can have")


class DType(NamedTuple):
    """An element type in both file formats."""

    size: int  # bytes
    safetensors: str | None = None  # its code in safetensors
    storage: str | None = None  # its storage class in torch.save; None: UntypedStorage


# By torch's names.
DTYPES = {
    "float64": DType(8, "F64", "DoubleStorage"),
    "float32": DType(4, "F32", "FloatStorage"),
    "float16": DType(2, "F16", "HalfStorage"),
    "bfloat16": DType(2, "BF16", "BFloat16Storage"),
    "float8_e4m3fn": DType(1, "F8_E4M3"),
    "float8_e5m2": DType(1, "F8_E5M2"),
    "int64": DType(8, "I64", "LongStorage"),
    "int32": DType(4, "I32", "IntStorage"),
    "int16": DType(2, "I16", "ShortStorage"),
    "int8": DType(1, "I8", "CharStorage"),
    "uint8": DType(1, "U8", "ByteStorage"),
    "uint16": DType(2, "U16"),
    "uint32": DType(4, "U32"),
    "uint64": DType(8, "U64"),
    "bool": DType(1, "BOOL", "BoolStorage"),
    "complex64": DType(8, "C64", "ComplexFloatStorage"),
    "complex128": DType(16, None, "ComplexDoubleStorage"),
}


@dataclass(eq=False, slots=True)
class ByteRange:
    """The bytes [offset, offset + num_bytes) of the open file ``fd``."""

    fd: int
    offset: int
    num_bytes: int
    crc: int | None = None  # the checksum that the file states, if any
    is_checked: bool = False  # whether the bytes have matched ``crc``


def row_major(shape: Sizes) -> Sizes:
    """Return the strides that torch gives a contiguous tensor of this shape."""
    sizes = (max(size, 1) for size in shape[:0:-1])
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] if shape else ()


@dataclass(unsafe_hash=True, slots=True)
class StoredTensor:
    """A strided view of a range of bytes; equal views have the same elements in the same order."""

    dtype: str  # a key of DTYPES
    shape: Sizes
    stride: Sizes  # elements between neighbours, per axis
    offset: int  # elements before the first one
    record: ByteRange

    def __post_init__(self) -> None:
        is_invalid = not len(self.shape) == len(self.stride) <= _MAX_AXES
        if not is_invalid:
            self.shape, self.stride = tuple(self.shape), tuple(self.stride)
            numbers = (*self.shape, *self.stride, self.offset)
            is_invalid = any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers)
            is_invalid = is_invalid or self.num_bytes >= 1 << 63
        if is_invalid:
            raise CheckpointError("damaged: a tensor's shape, stride or offset is impossible")
        if (self.offset + self.span) * self.itemsize > self.record.num_bytes:
            raise CheckpointError("damaged: a tensor reaches past the end of its storage")

    @property
    def itemsize(self) -> int:
        """Return the number of bytes per element."""
        return DTYPES[self.dtype].size

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all elements, without the gaps between them."""
        return math.prod(self.shape) * self.itemsize

    @property
    def span(self) -> int:
        """Return the number of elements from the first to the last one used, gaps included."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps) if self.num_bytes else 0

    @property
    def is_contiguous(self) -> bool:
        """Return whether the elements lie one after another in row-major order."""
        axes = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        return not self.num_bytes or all(n == 1 or step == dense for n, step, dense in axes)

    @property
    def is_whole(self) -> bool:
        """Return whether the range holds exactly these elements, in row-major order."""
        return self.is_contiguous and self.num_bytes == self.record.num_bytes


def stream(tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks. The next block overwrites the one before."""
    if tensor.is_contiguous:
        return read(tensor.record, tensor.offset * tensor.itemsize, tensor.num_bytes)
    return _gather(tensor)


def check(record: ByteRange, name: str) -> None:
    """Raise a CheckpointError if a range of bytes does not match the checksum in the file."""
    if record.crc is not None and not record.is_checked:
        crc = 0
        for chunk in read(record, 0, record.num_bytes):
            crc = zlib.crc32(chunk, crc)
        if crc != record.crc:
            raise CheckpointError(f"damaged: {name} does not match its checksum; copy it again")
        record.is_checked = True


def read(record: ByteRange, start: int, num_bytes: int, block: int = BLOCK) -> Iterator[memoryview]:
    """Yield bytes [start, start + num_bytes) of a range, in a buffer that each block overwrites."""
    buffer = memoryview(bytearray(min(block, num_bytes)))
    position, stop = record.offset + start, record.offset + start + num_bytes
    while position < stop:
        chunk = buffer[: stop - position]
        if os.preadv(record.fd, [chunk], position) != len(chunk):
            raise CheckpointError("truncated: the file ends in the middle of a tensor")
        yield chunk
        position += len(chunk)


def _gather(tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield a strided tensor's bytes in blocks, in bounded memory."""
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
    """Cut a tensor into blocks of at most ``_MAX_GATHERED`` bytes, in row-major order.

    ``first`` is the position of the tensor's first element. Yield (first, sizes) of each block.
    """
    num_bytes = math.prod(sizes) * itemsize
    if num_bytes <= _MAX_GATHERED:
        yield first, sizes
        return
    axis = next(i for i, size in enumerate(sizes) if size > 1)
    rows = max(1, _MAX_GATHERED * sizes[axis] // num_bytes)
    for start in range(0, sizes[axis], rows):
        corner = (*first[:axis], first[axis] + start, *first[axis + 1 :])
        size = min(rows, sizes[axis] - start)
        yield from _blocks(corner, (*sizes[:axis], size, *sizes[axis + 1 :]), itemsize)


def _fill(target: "npt.NDArray[Any]", record: ByteRange, offset: int, stride: Sizes) -> None:
    """Copy strided elements into ``target``, and read at most four times as many bytes."""
    import numpy as np

    spans = [(size - 1) * step for size, step in zip(target.shape, stride, strict=True)]
    itemsize, span = target.itemsize, 1 + sum(spans)
    if span * itemsize <= max(4 * target.nbytes, _MIN_READ):
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
