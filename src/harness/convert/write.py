"""Copy tensors into a new file, after its index: torch.save's zip, or safetensors."""

import errno
import itertools
import json
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from .layout import Blob, separate, share
from .stream import BLOCK, stream
from .tensors import DTYPES, CheckpointError, Tensor
from .torch_pickle import pickled_state

_ALIGNMENT = 64  # bytes, as torch.save does: torch.load(mmap=True) gives aligned tensors


def write_pt(
    fd: int, tensors: Mapping[str, Tensor], dtype: str, metadata: Mapping[str, Any]
) -> None:
    """Write torch.save's format: an OrderedDict of CPU tensors that share what they shared."""
    blobs, places = share(tensors, dtype)
    entries: list[tuple[str, bytes | Blob]] = [
        ("data.pkl", pickled_state(tensors, blobs, places, metadata)),
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


_IN_EXTRA = 0xFFFFFFFF
_PADDING = 0x4246  # "FB", the extra field with which torch.save itself aligns its records


def write_safetensors(
    fd: int, tensors: Mapping[str, Tensor], dtype: str, metadata: Mapping[str, Any]
) -> None:
    """Write the safetensors format, which has neither sharing nor module versions."""
    blobs = separate(tensors, dtype)
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


def _copy(fd: int, blob: Blob, position: int, buffer: memoryview) -> int:
    """Copy a blob to `position` and return its checksum, computed only if it is not known."""
    known, crc = blob.crc, 0
    try:
        for chunk in stream(blob.tensor, blob.dtype, buffer):
            if known is None:
                crc = zlib.crc32(chunk, crc)
            _write(fd, chunk, position)
            position += len(chunk)
    except CheckpointError as error:
        raise CheckpointError(f"{blob.name}: {error}") from error
    return crc if known is None else known


def _write(fd: int, content: bytes | bytearray | memoryview, position: int) -> None:
    view = memoryview(content)
    while view:
        num_written = os.pwrite(fd, view, position)
        view, position = view[num_written:], position + num_written


def _reserve(fd: int, num_bytes: int) -> None:
    """Find out now, not after minutes, that the disk is too small."""
    if num_bytes >= 1 << 63:
        raise CheckpointError("damaged: its tensors are larger than any file")
    if num_bytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # and otherwise this file system cannot tell
