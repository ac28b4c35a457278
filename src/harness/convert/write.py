"""Write tensors as a new file, after its index: torch.save's zip, or safetensors."""

import errno
import itertools
import json
import os
import pickle
import struct
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from .stream import BLOCK, stream
from .tensors import DTYPES, CheckpointError, Tensor, row_major, target_dtype

_ALIGNMENT = 64  # bytes, as torch.save does: torch.load(mmap=True) gives aligned tensors
_IN_EXTRA = 0xFFFFFFFF
_PADDING = 0x4246  # "FB", the extra field with which torch.save itself aligns its records

Place = tuple[int, int, tuple[int, ...]]  # a blob's index, offset and stride in it, in elements


class Blob(NamedTuple):
    """Elements that are written together: those of `tensor`, in row-major order, as `dtype`."""

    tensor: Tensor
    dtype: str
    name: str  # of one of the tensors in it

    @property
    def num_bytes(self) -> int:
        """Bytes in the new file."""
        return self.tensor.numel * DTYPES[self.dtype].size


def write_pt(
    fd: int, tensors: Mapping[str, Tensor], dtype: str, metadata: Mapping[str, Any]
) -> None:
    """Write torch.save's format: an OrderedDict of CPU tensors that share what they shared."""
    blobs, places = _share(tensors, dtype)
    entries: list[tuple[str, bytes | Blob]] = [
        ("data.pkl", _pickled(tensors, blobs, places, metadata)),
        ("byteorder", b"little"),
        *((f"data/{i}", blob) for i, blob in enumerate(blobs)),
        ("version", b"3\n"),
    ]
    _reserve(fd, sum(blob.num_bytes for blob in blobs))
    buffer, position, directory = memoryview(bytearray(BLOCK)), 0, bytearray()
    for name, content in entries:
        path = f"archive/{name}".encode()
        # Every entry has 64-bit sizes, so that small and large files take the same path.
        padding = -(position + 30 + len(path) + 24) % _ALIGNMENT
        start = position + 30 + len(path) + 24 + padding
        if isinstance(content, Blob):
            size, crc = content.num_bytes, _copy(fd, content, start, buffer)
        else:
            size, crc = len(content), zlib.crc32(content)
            _write(fd, content, start)
        fixed = struct.pack("<5HI2I", 45, 0, 0, 0, 0, crc, _IN_EXTRA, _IN_EXTRA)
        extra = struct.pack("<2H2Q2H", 1, 16, size, size, _PADDING, padding) + bytes(padding)
        lengths = struct.pack("<2H", len(path), len(extra))
        _write(fd, b"PK\3\4" + fixed + lengths + path + extra, position)
        extra = struct.pack("<2H3Q", 1, 24, size, size, position)
        lengths = struct.pack("<5H2I", len(path), len(extra), 0, 0, 0, 0, _IN_EXTRA)
        directory += b"PK\1\2" + struct.pack("<H", 45) + fixed + lengths + path + extra
        position = start + size
    num, size, end = len(entries), len(directory), position + len(directory)
    directory += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, num, num, size, position)
    directory += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    directory += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *[0xFFFF] * 2, *[_IN_EXTRA] * 2, 0)
    _write(fd, directory, position)
    os.ftruncate(fd, position + len(directory))


def write_safetensors(
    fd: int, tensors: Mapping[str, Tensor], dtype: str, metadata: Mapping[str, Any]
) -> None:
    """Write the safetensors format, which has neither sharing nor module versions."""
    blobs = [Blob(tensor, target_dtype(tensor, dtype), name) for name, tensor in tensors.items()]
    blobs.sort(key=lambda blob: -DTYPES[blob.dtype].size)  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = [0, *itertools.accumulate(blob.num_bytes for blob in blobs)]
    for blob, start, end in zip(blobs, ends, ends[1:], strict=False):
        code, name = DTYPES[blob.dtype].safetensors, blob.name
        if code is None or name == "__metadata__":
            raise CheckpointError(f"{name}: safetensors cannot hold {blob.dtype}; write a .pt")
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise CheckpointError(f"{name}: safetensors cannot hold this name; write a .pt")
        shape = list(blob.tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    _reserve(fd, base + ends[-1])
    _write(fd, struct.pack("<Q", len(text)) + text, 0)
    buffer = memoryview(bytearray(BLOCK))
    for blob, start in zip(blobs, ends, strict=False):
        _copy(fd, blob, base + start, buffer)


def _share(tensors: Mapping[str, Tensor], dtype: str) -> tuple[list[Blob], dict[str, Place]]:
    """Give tensors that overlap in the source one blob, so that they share memory again.

    A view with gaps is copied without them, once for all equal views.
    """
    groups: defaultdict[object, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in tensors.items():
        key: object = (tensor.record, tensor.dtype)
        if not tensor.is_dense or not tensor.numel:
            view = tensor.load_shards, tensor.offset, tensor.shape, tensor.stride, tensor.negate
            key = (key, view)
        groups[key].append((tensor.offset, tensor.offset + tensor.span, name))
    blobs: list[Blob] = []
    places: dict[str, Place] = {}
    for group in groups.values():
        first = end = -1  # of the elements that overlap so far
        for start, stop, name in sorted(group):
            tensor = tensors[name]
            if first < 0 or (start >= end and stop > end):
                first = end = start
                blobs.append(Blob(tensor, target_dtype(tensor, dtype), name))
            end = max(end, stop)
            offset, stride = 0, row_major(tensor.shape)
            if tensor.is_dense:
                blobs[-1] = blobs[-1]._replace(tensor=tensor.flat(first, end))
                offset, stride = start - first, tensor.stride
            places[name] = len(blobs) - 1, offset, stride
    return blobs, places


def _pickled(
    tensors: Mapping[str, Tensor],
    blobs: list[Blob],
    places: Mapping[str, Place],
    metadata: Mapping[str, Any],
) -> bytes:
    """Return what torch pickles for an OrderedDict of CPU tensors; blob i is the storage "i"."""
    parts = [b"\x80\x02", _EMPTY_DICT, b"("]
    for name, tensor in tensors.items():
        index, offset, stride = places[name]
        dtype, numel = blobs[index].dtype, blobs[index].tensor.numel
        if kind := DTYPES[dtype].storage:
            version, storage, length, element = 2, _global("torch", kind), numel, b""
        else:  # it lies in a storage of bytes
            version, storage = 3, _global("torch.storage", "UntypedStorage")
            length, element = blobs[index].num_bytes, _global("torch", dtype)
        parts += [_plain(name), _global("torch._utils", f"_rebuild_tensor_v{version}"), b"("]
        parts += [b"(", _plain("storage"), storage, _plain(str(index)), _plain("cpu")]
        parts += [_plain(length), b"tQ", *map(_plain, (offset, tensor.shape, stride, False))]
        parts += [_EMPTY_DICT, element, b"tR"]
    parts.append(b"u")
    if metadata:
        parts += [_plain({"_metadata": OrderedDict(metadata)}), b"b"]
    return b"".join([*parts, b"."])


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


_EMPTY_DICT = _global("collections", "OrderedDict") + b")R"


def _plain(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the end


def _copy(fd: int, blob: Blob, position: int, buffer: memoryview) -> int:
    """Copy a blob to `position` and return its checksum, as the source states it if it does."""
    stated = blob.tensor.stated_crc if blob.dtype == blob.tensor.dtype else None
    crc = stated or 0
    try:
        for chunk in stream(blob.tensor, blob.dtype, buffer):
            if stated is None:
                crc = zlib.crc32(chunk, crc)
            _write(fd, chunk, position)
            position += len(chunk)
    except CheckpointError as error:
        raise CheckpointError(f"{blob.name}: {error}") from error
    return crc


def _write(fd: int, content: bytes | bytearray | memoryview, position: int) -> None:
    num_written = 0
    while num_written < len(content):
        num_written += os.pwrite(fd, memoryview(content)[num_written:], position + num_written)


def _reserve(fd: int, num_bytes: int) -> None:
    """Find out now, not after minutes, that the disk is too small."""
    if num_bytes >= 1 << 63:
        raise CheckpointError("damaged: its tensors are larger than any file")
    try:
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # and otherwise this file system cannot tell
