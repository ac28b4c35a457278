"""Describe tensors as places in files.

A Record is a range of bytes in an open file; a Tensor is a strided view of one, or of several if
it is sharded. The readers (formats.py, checkpoint.py) make Tensors; stream.py reads their bytes.
"""

import errno
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from harness.errors import UserError


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
        # EINVAL is an offset that no file has, which the checkpoint states.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise CheckpointError(f"damaged: {what} cannot be read ({type(error).__name__})") from error


class Budget:
    """Charge what is built from a file against the file's size.

    A few bytes of a pickle can repeat what came before without end. Every opcode costs
    OPCODE_COST bytes and every name of a tensor NAME_COST; honest files have several times that.
    """

    OPCODE_COST, NAME_COST, PART_COST = 4, 100, 16

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


@dataclass(eq=False, slots=True)
class Tensor:
    """A strided view of a record, or of several when the tensor is sharded."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # steps between elements, in elements
    offset: int = 0  # of the first element in the record, in elements
    record: Record | None = None  # None for a sharded tensor
    # Returns pairs of the position of a shard's first element and the shard; they tile the tensor.
    load_shards: Callable[[], list[tuple[tuple[int, ...], "Tensor"]]] | None = None

    def __post_init__(self) -> None:
        is_odd = not len(self.shape) == len(self.stride) <= 64
        if not is_odd:
            self.shape, self.stride = tuple(self.shape), tuple(self.stride)
            numbers = (*self.shape, *self.stride, self.offset)
            is_odd = any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers)
            is_odd = is_odd or self.num_bytes >= 1 << 63
        if is_odd:
            raise CheckpointError("a tensor's shape, stride or offset makes no sense")
        if self.record and (self.offset + self.span) * self.itemsize > self.record.num_bytes:
            raise CheckpointError("a tensor reaches past the end of its storage")

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

    @property
    def span(self) -> int:
        """Elements of the record from the first to the last one used, gaps included."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps) if self.numel else 0

    @property
    def core(self) -> "Tensor":
        """The tensor without its repetitions: one element of an expanded axis."""
        if 0 not in self.stride:
            return self
        sizes = zip(self.shape, self.stride, strict=True)
        return replace(self, shape=tuple(size if step else min(size, 1) for size, step in sizes))

    @property
    def overlaps(self) -> bool:
        """Whether elements may share memory or interlace, other than by an expanded axis."""
        end = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and step:
                if step < end:
                    return True
                end += (size - 1) * step
        return False

    @property
    def is_plain(self) -> bool:
        """Whether the record holds the elements one after another in row-major order."""
        steps = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        in_order = all(size == 1 or step == wanted for size, step, wanted in steps)
        return (in_order and not self.load_shards) or not self.numel

    @property
    def stated_crc(self) -> int | None:
        """The checksum of exactly the tensor's bytes, where the file states it."""
        record = self.record
        is_whole = record and self.is_plain and self.num_bytes == record.num_bytes
        return record.crc if record and is_whole else None

    @property
    def records(self) -> list[Record]:
        """The records of the tensor or of its shards."""
        shards = self.load_shards() if self.load_shards else [((), self)]
        return [shard.record for _, shard in shards if shard.record]

    @property
    def view(self) -> tuple[Any, ...]:
        """A key that two tensors share if they are the same elements in the same order."""
        place = self.record, self.load_shards, self.offset
        return *place, self.dtype, self.shape, self.stride


def target_dtype(tensor: Tensor, dtype: str) -> str:
    """Return the element type to write: `dtype` changes floating tensors only."""
    is_floating = tensor.dtype.startswith(("float", "bfloat"))
    return dtype if is_floating and dtype != "keep" else tensor.dtype
