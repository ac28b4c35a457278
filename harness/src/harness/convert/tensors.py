"""Describe tensors as places in files, and what a file may cost.

A Record is a range of bytes in an open file; a Tensor is a strided view of one. checkpoint.py and
unpickle.py make them; stream.py reads their bytes.
"""

import errno
import itertools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from harness.errors import UserError

_MAX_AXES = 64


class CheckpointError(UserError):
    """The input is not a checkpoint, is damaged, or holds something that cannot be converted."""


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Report any failure in the block as damage: foreign bytes can fail in any way."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file may state an offset that no file has, which the system calls EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise CheckpointError(f"damaged: {what} cannot be read ({type(error).__name__})") from error


class Budget:
    """Charge what is built from a file against the file's size.

    A few bytes of a pickle can repeat what came before without end. Costs are in bytes; honest
    files have several times as many for each of these.
    """

    OPCODE = 4
    CONTAINER = 20  # a list or dict of JSON, or one that is searched for weights
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
    "float8_e8m0fnu": DType(1, "F8_E8M0"),
    "float8_e4m3fnuz": DType(1, "F8_E4M3FNUZ"),
    "float8_e5m2fnuz": DType(1, "F8_E5M2FNUZ"),
    "int64": DType(8, "I64", "LongStorage"),
    "int32": DType(4, "I32", "IntStorage"),
    "int16": DType(2, "I16", "ShortStorage"),
    "int8": DType(1, "I8", "CharStorage"),
    "uint8": DType(1, "U8", "ByteStorage"),
    "uint16": DType(2, "U16"),
    "uint32": DType(4, "U32"),
    "uint64": DType(8, "U64"),
    "bool": DType(1, "BOOL", "BoolStorage"),
    "complex32": DType(4),
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


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, as torch computes them."""
    sizes = (max(size, 1) for size in shape[:0:-1])
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] if shape else ()


@dataclass(unsafe_hash=True, slots=True)
class Tensor:
    """A strided view of a record; two are equal if they are the same elements in the same order."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # steps between elements, in elements
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
        """Bytes of an element."""
        return DTYPES[self.dtype].size

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements, without gaps."""
        return self.numel * self.itemsize

    def num_bytes_as(self, dtype: str) -> int:
        """Bytes of all elements after a change of floating types."""
        return self.numel * DTYPES[target_dtype(self, dtype)].size

    @property
    def span(self) -> int:
        """Elements of the record from the first to the last one used, gaps included."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps) if self.numel else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the record holds the elements one after another in row-major order."""
        steps = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        return not self.numel or all(size == 1 or step == plain for size, step, plain in steps)

    @property
    def stated_crc(self) -> int | None:
        """The checksum of exactly the tensor's bytes, where the file states it."""
        is_whole = self.is_contiguous and self.num_bytes == self.record.num_bytes
        return self.record.crc if is_whole else None


def target_dtype(tensor: Tensor, dtype: str) -> str:
    """Return the element type to write: `dtype` changes floating tensors only."""
    is_floating = tensor.dtype.startswith(("float", "bfloat"))
    return dtype if is_floating and dtype != "keep" else tensor.dtype
