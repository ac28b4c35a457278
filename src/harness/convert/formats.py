"""The formats of a single file: objects become data, tensors become places in the file."""

import io
import json
import os
import zipfile
import zlib
from collections import OrderedDict
from typing import Any

from .tensors import DTYPES, CheckpointError, Record, Tensor, parsing, row_major
from .unpickle import unpickle

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}
_BIG_ENDIAN = "saved on a big-endian machine; load and save it there as .safetensors"
_MAX_HEADER = 100_000_000  # bytes, the limit of the format


class Window(io.RawIOBase):
    """Part of an open file as a file of its own, with a position of its own."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self.fd, self.start, self.size, self._position = fd, start, size, 0

    def readable(self) -> bool:
        """Return True, as `seekable` does."""
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position, which belongs to this window alone."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of the window."""
        room = max(0, min(len(buffer), self.size - self._position))
        num_read = os.preadv(self.fd, [memoryview(buffer)[:room]], self.start + self._position)
        self._position += num_read
        return num_read


def read_zip(window: Window) -> Any:
    """Read torch.save's zip: data.pkl beside one stored record per storage."""
    with parsing("its zip directory, perhaps because it is truncated,"):
        archive = zipfile.ZipFile(window)
    entries = archive.infolist()
    infos = {entry.filename.partition("/")[2]: entry for entry in entries}
    if "constants.pkl" in infos:
        raise CheckpointError("a TorchScript program, not weights; torch.jit.load opens it")
    if "data.pkl" not in infos or len(infos) != len(entries):
        raise CheckpointError("a zip, but not one that torch.save writes: no data.pkl of its own")
    # torch.serialization.set_crc32_options(False) leaves every checksum zero.
    has_crcs = any(info.CRC for info in entries)

    def record(name: str) -> Record:
        info = infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError("zipped again with compression; unzip it and `zip -0 -r` it")
        with parsing(name), archive.open(info):  # which reads the header before the content
            offset = window.tell()
        if offset + info.file_size > window.size:
            raise CheckpointError(f"truncated: {name} reaches past the end of the file")
        crc = info.CRC if has_crcs else None
        return Record(window.fd, window.start + offset, info.file_size, crc)

    def small(name: str) -> bytes:
        found = record(name)
        content = os.pread(window.fd, found.num_bytes, found.offset)
        if found.crc not in (None, zlib.crc32(content)):
            raise CheckpointError(f"damaged: {name} does not match its checksum")
        return content

    if "byteorder" in infos and small("byteorder") != b"little":
        raise CheckpointError(_BIG_ENDIAN)
    records: dict[str, Record] = {}

    def record_of(key: str, itemsize: int, numel: int) -> Record:
        if key not in records:
            records[key] = record(f"data/{key}")
        if records[key].num_bytes != itemsize * numel:
            raise CheckpointError(f"damaged: data/{key} is not as long as its tensor says")
        return records[key]

    return unpickle(io.BytesIO(small("data.pkl")), record_of)


def read_legacy(window: Window) -> Any:
    """Read the format before torch 1.6: five pickles, then a length and bytes per storage."""
    file = io.BufferedReader(window)
    if unpickle(file) != _LEGACY_MAGIC:
        raise CheckpointError("a pickle that torch.save did not write; torch.save its tensors")
    _protocol, system = unpickle(file), unpickle(file)
    if not (isinstance(system, dict) and system.get("little_endian")):
        raise CheckpointError(_BIG_ENDIAN)
    records: dict[str, Record] = {}
    itemsizes: dict[str, int] = {}

    def record_of(key: str, itemsize: int, numel: int) -> Record:
        itemsizes[key] = itemsize
        return records.setdefault(key, Record(window.fd, 0, itemsize * numel))

    root = unpickle(file, record_of)
    keys, offset = unpickle(file), file.tell()
    if not all(isinstance(key, str | int) for key in keys):  # the text of others can be endless
        raise CheckpointError("damaged: its list of storages holds something else")
    if sorted(map(str, keys)) != sorted(records):
        raise CheckpointError("damaged, or holds quantized tensors, which cannot be located")
    for key in map(str, keys):
        numel = int.from_bytes(os.pread(window.fd, 8, offset), "little")
        records[key].offset = offset + 8
        offset += 8 + records[key].num_bytes
        if numel * itemsizes[key] != records[key].num_bytes or offset > window.size:
            raise CheckpointError("truncated or damaged: its storages do not fit in the file")
    return root


def read_safetensors(window: Window) -> Any:
    """Read a safetensors file: a JSON header of names, types, shapes and byte ranges."""
    num_header = int.from_bytes(os.pread(window.fd, 8, 0), "little")
    if num_header > _MAX_HEADER:
        raise CheckpointError("not a checkpoint: its safetensors header would be too large")
    tensors: OrderedDict[str, Tensor] = OrderedDict()
    with parsing("its safetensors header"):
        header = json.loads(os.pread(window.fd, num_header, 8))
        header.pop("__metadata__", None)
        base = end = 8 + num_header
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if type(start) is not int or type(stop) is not int:
                raise CheckpointError(f"damaged: the place of {name} is not in whole bytes")
            if entry["dtype"] not in _SAFETENSORS:
                raise CheckpointError(f"{name}: element type {entry['dtype']} is not known")
            record = Record(window.fd, base + start, stop - start)
            tensor = Tensor(_SAFETENSORS[entry["dtype"]], shape, row_major(shape), 0, record)
            if base + start != end or tensor.num_bytes != stop - start:
                raise CheckpointError(f"damaged: the bytes of {name} are not where they should be")
            tensors[name], end = tensor, base + stop
    if end != window.size:
        raise CheckpointError("truncated: the tensors reach past the end of the file")
    return tensors
