"""Describe tensors as places in files, read their bytes, and bound what a file may cost.

A Record is a range of bytes in an open file; a Tensor is a strided view of one, whose elements
`stream` yields in row-major order, a block at a time. checkpoint.py and unpickle.py make them;
conversion.py and write.py copy the blocks.
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

if TYPE_CHECKING:  # numpy takes 0.1 s and 15 MB, and a plain conversion does not need it
    import numpy.typing as npt

BLOCK = 1 << 20  # bytes; larger blocks are not faster, smaller ones are slower
_GATHERED = 8 << 20  # bytes gathered at once: of a transposed matrix, the larger the faster
_LEAST = 1 << 18  # bytes that are read at once, however few of them are wanted
_MAX_AXES = 64
Sizes = tuple[int, ...]  # or the position of an element


class CheckpointError(UserError):
    """The input is not a checkpoint, is damaged, or holds something that cannot be converted."""


@contextmanager
def parsing() -> Iterator[None]:
    """Report any failure in the block as damage: foreign bytes can fail in any way."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file may state an offset that no file has, which the system calls EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise CheckpointError(f"damaged or truncated ({type(error).__name__})") from error


class Budget:
    """Charge what is built from a file against the file's size.

    A few bytes of a pickle can repeat what came before without end. Costs are in bytes; honest
    files have several times as many for each of these.
    """

    OPCODE = 4
    CONTAINER = 20  # a list or dict of JSON
    NAME, PART = 50, 16  # a tensor's name, and each part of it between dots

    def __init__(self) -> None:
        self.left = 2_000_000

    def spend(self, amount: int) -> None:
        """Raise a CheckpointError if the file has fewer bytes than what is made of it costs."""
        self.left -= amount
        if self.left < 0:
            raise CheckpointError("damaged: it holds more objects than a file of its size can have")


class DType(NamedTuple):
    """An element type; `storage` is its class in torch.save, `safetensors` its code there."""

    size: int
    safetensors: str | None = None
    storage: str | None = None


# Keys are torch's names. A type without a storage class is saved over an UntypedStorage.
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
class Record:
    """Bytes [offset, offset + num_bytes) of the open file `fd`; `crc` as the file states it."""

    fd: int
    offset: int
    num_bytes: int
    crc: int | None = None
    is_checked: bool = False  # whether the bytes were found to have this checksum


def row_major(shape: Sizes) -> Sizes:
    """Return the strides of a contiguous tensor of this shape, as torch computes them."""
    sizes = (max(size, 1) for size in shape[:0:-1])
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] if shape else ()


@dataclass(unsafe_hash=True, slots=True)
class Tensor:
    """A strided view of a record; two are equal if they are the same elements in the same order."""

    dtype: str  # a key of DTYPES
    shape: Sizes
    stride: Sizes  # steps between elements, in elements
    offset: int  # of the first element in the record, in elements
    record: Record

    def __post_init__(self) -> None:
        is_odd = not len(self.shape) == len(self.stride) <= _MAX_AXES
        if not is_odd:
            self.shape, self.stride = tuple(self.shape), tuple(self.stride)
            numbers = (*self.shape, *self.stride, self.offset)
            is_odd = any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers)
            is_odd = is_odd or self.num_bytes >= 1 << 63
        if is_odd:
            raise CheckpointError("damaged: a tensor's shape, stride or offset makes no sense")
        if (self.offset + self.span) * self.itemsize > self.record.num_bytes:
            raise CheckpointError("damaged: a tensor reaches past the end of its storage")

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element."""
        return DTYPES[self.dtype].size

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all elements, without gaps."""
        return math.prod(self.shape) * self.itemsize

    @property
    def span(self) -> int:
        """Return the number of the record's elements from the first to the last one used."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps) if self.num_bytes else 0

    @property
    def is_contiguous(self) -> bool:
        """Return whether the record holds the elements one after another in row-major order."""
        steps = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        return not self.num_bytes or all(size == 1 or step == plain for size, step, plain in steps)

    @property
    def is_whole(self) -> bool:
        """Return whether the record holds these elements in row-major order, and no others."""
        return self.is_contiguous and self.num_bytes == self.record.num_bytes


def stream(tensor: Tensor) -> Iterator[memoryview]:
    """Return the bytes of a tensor in blocks, each of which is gone when the next is asked for."""
    if tensor.is_contiguous:
        return read(tensor.record, tensor.offset * tensor.itemsize, tensor.num_bytes)
    return _gather(tensor)


def check(record: Record, name: str) -> None:
    """Raise a CheckpointError unless a record matches its checksum, if the file states one."""
    if record.crc is not None and not record.is_checked:
        crc = 0
        for chunk in read(record, 0, record.num_bytes):
            crc = zlib.crc32(chunk, crc)
        if crc != record.crc:
            raise CheckpointError(f"damaged: {name} does not match its checksum; copy it again")
        record.is_checked = True


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


def _fill(target: "npt.NDArray[Any]", record: Record, offset: int, stride: Sizes) -> None:
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
