"""What a checkpoint holds, as data: records are bytes in a file, tensors are views of records."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

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
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


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
    negate: str = ""  # the parts that torch's lazy bits negate: "imag" (conj), "all" (neg), "real"

    def __post_init__(self) -> None:
        numbers, num_dims = (*self.shape, *self.stride, self.offset), len(self.shape)
        is_odd = any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers)
        if is_odd or num_dims != len(self.stride) or num_dims > 64:
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
    def is_dense(self) -> bool:
        """Whether each element of the span is used once, in whatever order (channels-last is)."""
        steps = sorted((t, n) for n, t in zip(self.shape, self.stride, strict=True) if n > 1)
        expected = 1
        for step, size in steps:
            if step != expected:
                return not self.numel
            expected *= size
        return not (self.load_shards or self.negate)

    @property
    def is_plain(self) -> bool:
        """Whether the record holds the elements one after another in row-major order."""
        strides = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        in_order = all(size == 1 or step == expected for size, step, expected in strides)
        return (in_order and self.is_dense) or not self.numel

    @property
    def whole_record(self) -> Record | None:
        """The record, if the tensor's bytes are all of it in the same order."""
        plain = self.record and self.is_plain and self.num_bytes == self.record.num_bytes
        return self.record if plain else None

    @property
    def stated_crc(self) -> int | None:
        """The checksum of exactly the tensor's bytes, where the file states it."""
        return self.whole_record.crc if self.whole_record else None

    @property
    def records(self) -> list[Record]:
        """The records of the tensor or of its shards."""
        shards = self.load_shards() if self.load_shards else [((), self)]
        return [shard.record for _, shard in shards if shard.record]

    def flat(self, start: int, stop: int) -> "Tensor":
        """Return elements [start, stop) of the record as they lie there."""
        return Tensor(self.dtype, (stop - start,), (1,), start, self.record)


def target_dtype(tensor: Tensor, dtype: str) -> str:
    """Return the element type to write: `dtype` changes floating tensors only."""
    is_floating = tensor.dtype.startswith(("float", "bfloat"))
    return dtype if is_floating and dtype != "keep" else tensor.dtype
