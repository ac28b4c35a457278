"""Decide which elements are written once, and where in them each tensor lies."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .tensors import DTYPES, Tensor, row_major


class Blob(NamedTuple):
    """Elements that are written together: those of `tensor`, in row-major order, as `dtype`."""

    tensor: Tensor
    dtype: str
    name: str  # of one of the tensors in it

    @property
    def num_bytes(self) -> int:
        """Bytes in the new file."""
        return self.tensor.numel * DTYPES[self.dtype].size

    @property
    def crc(self) -> int | None:
        """The checksum, if the source states that of these very bytes."""
        record = self.tensor.whole_record if self.dtype == self.tensor.dtype else None
        return record.crc if record else None


class Place(NamedTuple):
    """Where a tensor lies: in which blob, offset and stride in elements."""

    blob: int
    offset: int
    stride: tuple[int, ...]


def target_dtype(tensor: Tensor, dtype: str) -> str:
    """Return the element type to write: `dtype` changes floating tensors only."""
    is_floating = tensor.dtype.startswith(("float", "bfloat"))
    return dtype if is_floating and dtype != "keep" else tensor.dtype


def separate(tensors: Mapping[str, Tensor], dtype: str) -> list[Blob]:
    """Give each tensor a contiguous blob of its own."""
    return [Blob(t, target_dtype(t, dtype), name) for name, t in tensors.items()]


def share(tensors: Mapping[str, Tensor], dtype: str) -> tuple[list[Blob], dict[str, Place]]:
    """Give tensors that overlap in the source one blob, so that they share memory again.

    Views without gaps keep their strides in it. A view with gaps is copied without them, once
    for all equal views.
    """
    groups: defaultdict[object, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        key: object = (tensor.record, tensor.dtype)
        if not tensor.is_dense or not tensor.numel:
            view = tensor.load_shards, tensor.offset, tensor.shape, tensor.stride, tensor.negate
            key = (key, view)
        groups[key].append((tensor.offset, tensor.offset + tensor.span, name))
    blob_of: dict[str, Blob] = {}
    for group in groups.values():
        for names, start, stop in _overlapping(group):
            tensor = tensors[names[0]]
            if tensor.is_dense:
                tensor = tensor.flat(start, stop)
            blob = Blob(tensor, target_dtype(tensor, dtype), names[0])
            blob_of.update(dict.fromkeys(names, blob))
    blobs = list({id(blob): blob for blob in (blob_of[name] for name in tensors)}.values())
    index = {id(blob): i for i, blob in enumerate(blobs)}
    places = {}
    for name, tensor in tensors.items():
        blob = blob_of[name]
        offset, stride = 0, row_major(tensor.shape)
        if tensor.is_dense:
            offset, stride = tensor.offset - blob.tensor.offset, tensor.stride
        places[name] = Place(index[id(blob)], offset, stride)
    return blobs, places


def _overlapping(
    intervals: Iterable[tuple[int, int, str]],
) -> Iterator[tuple[list[str], int, int]]:
    """Join intervals that overlap: yield their names, and where the union starts and stops."""
    names: list[str] = []
    first = end = 0
    for start, stop, name in sorted(intervals):
        if names and start >= end and stop > end:
            yield names, first, end
            names = []
        first, end = (first, max(end, stop)) if names else (start, stop)
        names.append(name)
    yield names, first, end
