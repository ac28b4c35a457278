"""Write tensors as a new file, torch.save's zip or safetensors, and hold the file against them.

In: Tensors by name. Out: the file, and a Written: the bytes ("blobs") that it should hold, and
where each tensor lies in them. `verify` reads the file again and compares.
"""

import errno
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from .stream import check, crc32, read, stream
from .tensors import DTYPES, CheckpointError, Record, Tensor, row_major, target_dtype

_ALIGNMENT = 64  # bytes, as torch.save does: torch.load(mmap=True) gives aligned tensors
_PADDING = 0x4246  # "FB", the extra field with which torch.save itself aligns its records
_NOT_WRITTEN = "{} was not written as it is in the source: a failing disk or memory"


@dataclass(eq=False)
class Blob:
    """Elements that are written together: those of `tensor`, in row-major order, as `dtype`."""

    tensor: Tensor
    dtype: str
    name: str  # of one of the tensors in it
    crc: int = 0  # of the bytes that were written

    @property
    def num_bytes(self) -> int:
        """Bytes in the new file."""
        return self.tensor.numel * DTYPES[self.dtype].size

    @property
    def stated_crc(self) -> int | None:
        """The checksum that the source states for exactly these bytes."""
        return self.tensor.stated_crc if self.dtype == self.tensor.dtype else None


@dataclass
class Written:
    """What a file holds: blobs, and for each tensor its blob, offset and strides in elements."""

    blobs: list[Blob] = field(default_factory=list)
    places: dict[str, tuple[Blob, int, tuple[int, ...]]] = field(default_factory=dict)


def write_pt(file: BinaryIO, tensors: Mapping[str, Tensor], dtype: str, max_bytes: int) -> Written:
    """Write torch.save's format: an OrderedDict of CPU tensors that share what they shared.

    Raises:
        CheckpointError: more than `max_bytes` would be written.
        OSError: the disk is full, or the system refuses to write.
    """
    written = _share(tensors, dtype)
    pickled = _pickled(tensors, written)
    _reserve(file, written.blobs, max_bytes)
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            _add(archive, name, text)
        for i, blob in enumerate(written.blobs):
            _add(archive, f"data/{i}", blob)
    return written


def _add(archive: zipfile.ZipFile, name: str, content: bytes | Blob) -> None:
    """Add an aligned entry. `archive.open` would compute the checksum that a blob has already."""
    file, info = cast(BinaryIO, archive.fp), zipfile.ZipInfo(f"archive/{name}")
    info.header_offset, info.CRC = archive.start_dir, 0
    info.file_size = content.num_bytes if isinstance(content, Blob) else len(content)
    info.compress_size = info.file_size
    padding = -(info.header_offset + len(info.FileHeader()) + 4) % _ALIGNMENT
    info.extra = struct.pack("<2H", _PADDING, padding) + bytes(padding)
    file.seek(info.header_offset + len(info.FileHeader()))
    if isinstance(content, Blob):
        _copy(file, content)
        info.CRC = content.crc
    else:
        info.CRC = zlib.crc32(content)
        file.write(content)
    archive.start_dir = file.tell()
    file.seek(info.header_offset)
    file.write(info.FileHeader())
    archive.filelist.append(info)


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], dtype: str, max_bytes: int
) -> Written:
    """Write the safetensors format, which has no sharing."""
    blobs = [Blob(tensor, target_dtype(tensor, dtype), name) for name, tensor in tensors.items()]
    blobs.sort(key=lambda blob: -DTYPES[blob.dtype].size)  # keeps every tensor aligned
    written = Written(blobs, {b.name: (b, 0, row_major(b.tensor.shape)) for b in blobs})
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for blob in blobs:
        code, name = DTYPES[blob.dtype].safetensors, blob.name
        if code is None or name == "__metadata__" or any("\ud800" <= c <= "\udfff" for c in name):
            what = blob.dtype if code is None else "this name"
            raise CheckpointError(f"{name}: safetensors cannot hold {what}; write a .pt")
        start, end = end, end + blob.num_bytes
        shape = list(blob.tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _reserve(file, blobs, max_bytes)
    file.write(struct.pack("<Q", len(text)) + text)
    for blob in blobs:
        _copy(file, blob)
    return written


def verify(written: Written, root: Mapping[str, Tensor]) -> None:
    """Raise a CheckpointError unless the file that was read as `root` is what was to be written.

    A checksum that the source states for a blob's bytes is compared with those of the new file:
    one reading then finds damage of either. Other records of the source are read again.
    """
    if written.places.keys() != root.keys():
        raise CheckpointError(_NOT_WRITTEN.format("the list of tensors"))
    records: dict[Blob, Record | None] = {}
    for name, (blob, offset, stride) in written.places.items():
        copy = root[name]
        if (copy.dtype, copy.offset, copy.stride) != (blob.dtype, offset, stride):
            raise CheckpointError(_NOT_WRITTEN.format(name))
        records[blob] = copy.record
    partly_copied: dict[Record, str] = {}
    for blob, record in records.items():
        if blob.stated_crc is None:
            partly_copied |= dict.fromkeys(blob.tensor.records, blob.name)
        if record and crc32(read(record, 0, record.num_bytes)) != blob.crc:
            if blob.stated_crc is not None:
                check(blob.tensor.records[0], blob.name)
            raise CheckpointError(_NOT_WRITTEN.format(blob.name))
    for record, name in partly_copied.items():
        check(record, name)


def _share(tensors: Mapping[str, Tensor], dtype: str) -> Written:
    """Give tensors that overlap in the source one blob, so that they share memory again.

    If most of the memory between them is not used, each different view gets a blob of its own,
    without its gaps.
    """
    written = Written()
    in_records: defaultdict[object, list[tuple[int, int, str]]] = defaultdict(list)
    alone: defaultdict[object, list[str]] = defaultdict(list)  # names of equal views
    for name, tensor in tensors.items():
        if tensor.load_shards or not tensor.numel:
            alone[tensor.view].append(name)
        else:
            span = tensor.offset, tensor.offset + tensor.span, name
            in_records[tensor.record, tensor.dtype].append(span)
    for spans in in_records.values():
        for start, stop, names in _merged(spans):
            views = {tensors[name].view: tensors[name].core for name in names}.values()
            num_used = sum(view.numel for view in views)
            if 2 * num_used < stop - start and not any(view.overlaps for view in views):
                for name in names:
                    alone[tensors[name].view].append(name)
                continue
            first = tensors[names[0]]
            flat = Tensor(first.dtype, (stop - start,), (1,), start, first.record)
            written.blobs.append(Blob(flat, target_dtype(flat, dtype), names[0]))
            for name in names:
                place = written.blobs[-1], tensors[name].offset - start, tensors[name].stride
                written.places[name] = place
    for names in alone.values():
        tensor = tensors[names[0]]
        steps = zip(tensor.stride, row_major(tensor.core.shape), strict=True)
        stride = tuple(new if old else 0 for old, new in steps)
        written.blobs.append(Blob(tensor.core, target_dtype(tensor, dtype), names[0]))
        written.places |= dict.fromkeys(names, (written.blobs[-1], 0, stride))
    return written


def _merged(spans: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, list[str]]]:
    """Join (start, stop, name) of views that overlap."""
    first, end, names = 0, 0, list[str]()
    for start, stop, name in sorted(spans):
        if names and start >= end:
            yield first, end, names
            names = []
        if not names:
            first = end = start
        end = max(end, stop)
        names.append(name)
    if names:
        yield first, end, names


def _pickled(tensors: Mapping[str, Tensor], written: Written) -> bytes:
    """Return what torch pickles for an OrderedDict of CPU tensors; blob i is the storage "i"."""
    memo: dict[bytes, bytes] = {}
    keys = {blob: str(i) for i, blob in enumerate(written.blobs)}

    def named(module: str, name: str) -> bytes:
        opcodes = f"c{module}\n{name}\n".encode()
        if opcodes in memo:
            return memo[opcodes]
        number = bytes([100 + len(memo)])  # the values use the first few
        memo[opcodes] = b"h" + number
        return opcodes + b"q" + number

    ordered = "collections", "OrderedDict"
    parts = [b"\x80\x02", named(*ordered), b")R("]
    for name, tensor in tensors.items():
        blob, offset, stride = written.places[name]
        kind = DTYPES[blob.dtype].storage  # or it lies in a storage of bytes
        parts += [_plain(name), named("torch._utils", f"_rebuild_tensor_v{2 if kind else 3}")]
        storage = ("torch", kind) if kind else ("torch.storage", "UntypedStorage")
        parts += [b"((", _plain("storage"), named(*storage), _plain(keys[blob]), _plain("cpu")]
        parts += [_plain(blob.tensor.numel if kind else blob.num_bytes), b"tQ"]
        parts += map(_plain, (offset, tensor.shape, stride, False))
        parts += [named(*ordered), b")R", b"" if kind else named("torch", blob.dtype), b"tR"]
    return b"".join([*parts, b"u."])


def _plain(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the end


def _copy(file: BinaryIO, blob: Blob) -> None:
    """Copy a blob; its checksum is the one that the source states, if it does."""
    stated = blob.stated_crc
    blob.crc = stated or 0
    try:
        for chunk in stream(blob.tensor, blob.dtype):
            if stated is None:
                blob.crc = zlib.crc32(chunk, blob.crc)
            file.write(chunk)
    except CheckpointError as error:
        raise CheckpointError(f"{blob.name}: {error}") from error


def _reserve(file: BinaryIO, blobs: list[Blob], max_bytes: int) -> None:
    """Find out now, not after minutes, that the disk is too small or the result is too large."""
    num_bytes = sum(blob.num_bytes for blob in blobs)
    # What a view passes over is read as well, but that is faster.
    num_passed = sum(blob.tensor.core.span * blob.tensor.itemsize for blob in blobs)
    if (cost := max(num_bytes, num_passed // 16)) > max_bytes:
        raise CheckpointError(
            f"{cost / 1e9:,.1f} GB would be made of it, which its size does not explain "
            "(expanded views?)"
        )
    try:
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # and otherwise this file system cannot tell
