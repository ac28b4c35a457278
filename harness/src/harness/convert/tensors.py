"""What a checkpoint holds, as data: records are bytes in a file, tensors are views of records."""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from harness.errors import UserError


class CheckpointError(UserError):
    """The input is not a checkpoint, is damaged, or holds something that cannot be converted."""


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Report whatever goes wrong in the block as damage: foreign bytes can fail in any way."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(f"damaged: {what} cannot be read ({type(error).__name__})") from error


class Budget:
    """What may be made of a file, in proportion to the bytes that were read of it.

    A few bytes of a pickle can repeat what came before. Work that such repetitions multiply, rather
    than the length of the file, is paid for in units of about 10 us and 100 bytes.
    """

    def __init__(self) -> None:
        self.left = 200_000  # so that a small file may repeat itself

    def spend(self, amount: int) -> None:
        """Pay for work that is about to be done.

        Raises:
            CheckpointError: the file has not as many bytes as that.
        """
        self.left -= amount
        if self.left < 0:
            raise CheckpointError("damaged: it repeats itself more often than any checkpoint does")

    def spend_names(self, state: Mapping[str, Any]) -> None:
        """Pay for the entries of a state_dict; each part of a name leads to a copy of the rest."""
        for name, value in state.items():
            size = 48 + 8 * len(value.shape) if isinstance(value, Tensor) else 8
            self.spend(size + len(name) * (1 + name.count(".")) // 16)


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
    # Returns pairs of a shard and the position of its first element; they tile the tensor.
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
        """The tensor without its repetitions: of an expanded axis one element."""
        if 0 not in self.stride:
            return self
        sizes = zip(self.shape, self.stride, strict=True)
        return replace(self, shape=tuple(size if step else min(size, 1) for size, step in sizes))

    @property
    def overlaps(self) -> bool:
        """Whether elements may share memory, or interlace, and not for an expanded axis alone."""
        end = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1 and step:
                if step < end:
                    return True
                end += (size - 1) * step
        return False

    @property
    def has_gaps(self) -> bool:
        """Whether it passes over elements of the record, besides those that it repeats."""
        return self.span > self.core.numel

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
        """What two tensors have in common that are the same elements in the same order."""
        place = self.record, self.load_shards, self.offset
        return *place, self.dtype, self.shape, self.stride

    def flat(self, start: int, stop: int) -> "Tensor":
        """Return elements [start, stop) of the record as they lie there."""
        return Tensor(self.dtype, (stop - start,), (1,), start, self.record)


def target_dtype(tensor: Tensor, dtype: str) -> str:
    """Return the element type to write: `dtype` changes floating tensors only."""
    is_floating = tensor.dtype.startswith(("float", "bfloat"))
    return dtype if is_floating and dtype != "keep" else tensor.dtype
