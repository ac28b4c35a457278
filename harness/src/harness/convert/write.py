"""Write tensors as a new file, after its index: torch.save's zip, or safetensors."""

import errno
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

from .stream import merged, stream
from .tensors import DTYPES, CheckpointError, Tensor, row_major, target_dtype

_MAX_PASSED = 100  # times all that views with gaps are views of
_ALIGNMENT = 64  # bytes, as torch.save does: torch.load(mmap=True) gives aligned tensors
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
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    dtype: str,
    most: float,
) -> None:
    """Write torch.save's format: an OrderedDict of CPU tensors that share what they shared.

    Raises:
        CheckpointError: the tensors have more than `most` bytes.
        OSError: the disk is full, or the system refuses to write.
    """
    blobs, places = _share(tensors, dtype)
    pickled = _pickled(tensors, blobs, places)
    _reserve(file, blobs, most)
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            _add(archive, name, text)
        for i, blob in enumerate(blobs):
            _add(archive, f"data/{i}", blob)


def _add(archive: zipfile.ZipFile, name: str, content: "bytes | Blob") -> None:
    """Add an aligned entry. Where the source states its checksum, that is the new one."""
    file, info = cast(BinaryIO, archive.fp), zipfile.ZipInfo(f"archive/{name}")
    info.header_offset, info.CRC = archive.start_dir, 0
    info.file_size = content.num_bytes if isinstance(content, Blob) else len(content)
    info.compress_size = info.file_size
    padding = -(info.header_offset + len(info.FileHeader()) + 4) % _ALIGNMENT
    info.extra = struct.pack("<2H", _PADDING, padding) + bytes(padding)
    file.seek(info.header_offset + len(info.FileHeader()))
    if isinstance(content, Blob):
        info.CRC = _copy(file, content)
    else:
        info.CRC = zlib.crc32(content)
        file.write(content)
    archive.start_dir = file.tell()
    file.seek(info.header_offset)
    file.write(info.FileHeader())
    archive.filelist.append(info)


def write_safetensors(
    file: BinaryIO,
    tensors: Mapping[str, Tensor],
    dtype: str,
    most: float,
) -> None:
    """Write the safetensors format, which has no sharing."""
    blobs = [Blob(tensor, target_dtype(tensor, dtype), name) for name, tensor in tensors.items()]
    blobs.sort(key=lambda blob: -DTYPES[blob.dtype].size)  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for blob in blobs:
        code, name = DTYPES[blob.dtype].safetensors, blob.name
        if code is None or name == "__metadata__":
            raise CheckpointError(f"{name}: safetensors cannot hold {blob.dtype}; write a .pt")
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise CheckpointError(f"{name}: safetensors cannot hold this name; write a .pt")
        start, end = end, end + blob.num_bytes
        shape = list(blob.tensor.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _reserve(file, blobs, most)
    file.write(struct.pack("<Q", len(text)) + text)
    for blob in blobs:
        _copy(file, blob)


def _share(tensors: Mapping[str, Tensor], dtype: str) -> tuple[list[Blob], dict[str, Place]]:
    """Give tensors that overlap in the source one blob, so that they share memory again.

    A view with gaps is copied without them, once for all equal views, unless all of what overlaps
    is as small together, or faster to copy.
    """
    packed: defaultdict[object, list[str]] = defaultdict(list)  # names of equal views
    in_records: defaultdict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.load_shards or not tensor.numel:
            packed[tensor.view].append(name)
        else:
            in_records[tensor.record, tensor.dtype].append(name)

    def overlapping(names: list[str]) -> Iterator[tuple[int, int, list[str]]]:
        return merged((t.offset, t.offset + t.span, n) for n in names for t in [tensors[n]])

    wholes: list[tuple[int, int, list[str]]] = []
    for in_record in in_records.values():
        for start, stop, names in overlapping(in_record):
            if _is_better_whole([tensors[name] for name in names], stop - start):
                wholes.append((start, stop, names))
                continue
            for name in names:
                if tensors[name].has_gaps:
                    packed[tensors[name].view].append(name)
            wholes += overlapping([name for name in names if not tensors[name].has_gaps])
    blobs: list[Blob] = []
    places: dict[str, Place] = {}
    for start, stop, names in wholes:
        for name in names:
            places[name] = len(blobs), tensors[name].offset - start, tensors[name].stride
        flat = tensors[names[0]].flat(start, stop)
        blobs.append(Blob(flat, target_dtype(flat, dtype), names[0]))
    for names in packed.values():
        tensor = tensors[names[0]]
        steps = zip(tensor.stride, row_major(tensor.core.shape), strict=True)
        stride = tuple(new if old else 0 for old, new in steps)
        places |= dict.fromkeys(names, (len(blobs), 0, stride))
        blobs.append(Blob(tensor.core, target_dtype(tensor, dtype), names[0]))
    return blobs, places


def _is_better_whole(tensors: list[Tensor], span: int) -> bool:
    """Whether views are better kept as they lie in so many elements, gaps and all."""
    views = {tensor.view: tensor for tensor in tensors}.values()
    num_wanted, num_passed = sum(v.core.numel for v in views), sum(v.span for v in views)
    overlaps = any(view.core.overlaps for view in views)
    return overlaps or num_wanted >= span or num_passed > _MAX_PASSED * span


def _pickled(
    tensors: Mapping[str, Tensor],
    blobs: list[Blob],
    places: Mapping[str, Place],
) -> bytes:
    """Return what torch pickles for an OrderedDict of CPU tensors; blob i is the storage "i"."""
    memo: dict[bytes, bytes] = {}

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
        index, offset, stride = places[name]
        dtype, numel = blobs[index].dtype, blobs[index].tensor.numel
        kind = DTYPES[dtype].storage  # or it lies in a storage of bytes
        parts += [_plain(name), named("torch._utils", f"_rebuild_tensor_v{2 if kind else 3}")]
        storage = ("torch", kind) if kind else ("torch.storage", "UntypedStorage")
        parts += [b"((", _plain("storage"), named(*storage), _plain(str(index)), _plain("cpu")]
        parts += [_plain(numel if kind else blobs[index].num_bytes), b"tQ"]
        parts += map(_plain, (offset, tensor.shape, stride, False))
        parts += [named(*ordered), b")R", b"" if kind else named("torch", dtype), b"tR"]
    parts.append(b"u")
    return b"".join([*parts, b"."])


def _plain(value: Any) -> bytes:
    """Return the opcodes that push a value."""
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the end


def _copy(file: BinaryIO, blob: Blob) -> int:
    """Copy a blob and return its checksum, as the source states it if it does."""
    stated = blob.tensor.stated_crc if blob.dtype == blob.tensor.dtype else None
    crc = stated or 0
    try:
        for chunk in stream(blob.tensor, blob.dtype):
            if stated is None:
                crc = zlib.crc32(chunk, crc)
            file.write(chunk)
    except CheckpointError as error:
        raise CheckpointError(f"{blob.name}: {error}") from error
    return crc


def _reserve(file: BinaryIO, blobs: list[Blob], most: float) -> None:
    """Find out now, not after minutes, that the disk is too small or the result is too large."""
    num_bytes = sum(blob.num_bytes for blob in blobs)
    # What a view passes over is read as well, but that is faster.
    num_passed = sum(blob.tensor.core.span * blob.tensor.itemsize for blob in blobs)
    if (cost := max(num_bytes, num_passed // 16)) > most:
        raise CheckpointError(
            f"{cost / 1e9:,.1f} GB would be made of it, which its size does not explain "
            "(expanded views?)"
        )
    if num_bytes >= 1 << 63:
        raise CheckpointError("damaged: its tensors are larger than any file")
    try:
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # and otherwise this file system cannot tell
