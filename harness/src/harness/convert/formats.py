"""Read the formats of a single file: torch.save's zip, its legacy format, safetensors.

In: a window of an open file. Out: what was saved, as data, with Tensors for places in the file.
"""

import io
import json
import os
import struct
import zipfile
from collections import OrderedDict
from typing import Any

from .stream import check, read
from .tensors import DTYPES, Budget, CheckpointError, Record, Tensor, parsing, row_major
from .unpickle import unpickle

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}
_BIG_ENDIAN = "saved on a big-endian machine; load and save it there as .safetensors"
_JSON_COST = 20  # bytes of the budget for each container in a header
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format; also of a zip's directory


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

    def read(self, size: int = -1, /) -> bytes:
        """Read so many bytes at once, unless they would be too many."""
        if size > _MAX_HEADER:
            raise CheckpointError("damaged: its zip directory would be too large")
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of the window."""
        room = max(0, min(len(buffer), self.size - self._position))
        num_read = os.preadv(self.fd, [memoryview(buffer)[:room]], self.start + self._position)
        self._position += num_read
        return num_read


def read_zip(window: Window, budget: Budget) -> Any:
    """Read torch.save's zip: data.pkl beside one stored record per storage."""
    with parsing("its zip directory, perhaps because it is truncated,"):
        entries = zipfile.ZipFile(window).infolist()
    infos = {entry.filename.partition("/")[2]: entry for entry in entries}
    if "constants.pkl" in infos:
        raise CheckpointError("a TorchScript program, not weights; torch.jit.load opens it")
    if "data.pkl" not in infos or len(infos) != len(entries):
        raise CheckpointError("a zip, but not one that torch.save writes: no data.pkl of its own")
    if sum(info.compress_size for info in entries) > window.size:
        raise CheckpointError("truncated, or damaged: its entries are larger than the file")
    # torch.serialization.set_crc32_options(False) leaves every checksum zero.
    has_crcs = any(info.CRC for info in entries)

    def record(name: str) -> Record:
        info = infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError("zipped again with compression; unzip it and `zip -0 -r` it")
        with parsing(name):
            start = window.start + info.header_offset
            header = os.pread(window.fd, 30, start)
            if not header.startswith(b"PK\3\4"):
                raise ValueError("no header")
        start += 30 + sum(struct.unpack("<2H", header[26:]))
        if start + info.file_size > window.start + window.size:
            raise CheckpointError(f"truncated: {name} reaches past the end of the file")
        return Record(window.fd, start, info.file_size, info.CRC if has_crcs else None)

    if "byteorder" in infos:
        order = record("byteorder")
        if os.pread(window.fd, 9, order.offset)[: order.num_bytes] != b"little":
            raise CheckpointError(_BIG_ENDIAN)
    records: dict[str, Record] = {}

    def record_of(key: str, itemsize: int, numel: int) -> Record:
        if key not in records:
            records[key] = record(f"data/{key}")
        if records[key].num_bytes != itemsize * numel:
            raise CheckpointError(f"damaged: data/{key} is not as long as its tensor says")
        return records[key]

    pickled = record("data.pkl")
    check(pickled, "data.pkl")
    content = Window(window.fd, pickled.offset, pickled.num_bytes)
    return unpickle(io.BufferedReader(content), budget, record_of)


def read_legacy(window: Window, budget: Budget) -> Any:
    """Read the format before torch 1.6: five pickles, then a length and bytes per storage."""
    file = io.BufferedReader(window)
    if unpickle(file, budget) != _LEGACY_MAGIC:
        raise CheckpointError("a pickle that torch.save did not write; torch.save its tensors")
    _protocol, system = unpickle(file, budget), unpickle(file, budget)
    if not (isinstance(system, dict) and system.get("little_endian")):
        raise CheckpointError(_BIG_ENDIAN)
    records: dict[str, Record] = {}
    itemsizes: dict[str, int] = {}

    def record_of(key: str, itemsize: int, numel: int) -> Record:
        itemsizes[key] = itemsize
        return records.setdefault(key, Record(window.fd, 0, itemsize * numel))

    root = unpickle(file, budget, record_of)
    keys, offset = unpickle(file, budget), file.tell()
    # str() of a huge number takes quadratic time.
    if not all(isinstance(key, str) or (type(key) is int and 0 <= key < 1 << 64) for key in keys):
        raise CheckpointError("damaged: its list of storages holds something else")
    if len(keys) != len(records) or set(map(str, keys)) != records.keys():
        raise CheckpointError("damaged, or holds quantized tensors, which cannot be located")
    for key in map(str, keys):
        numel = int.from_bytes(os.pread(window.fd, 8, offset), "little")
        records[key].offset = offset + 8
        offset += 8 + records[key].num_bytes
        if numel * itemsizes[key] != records[key].num_bytes or offset > window.size:
            raise CheckpointError("truncated or damaged: its storages do not fit in the file")
    return root


def read_safetensors(window: Window, budget: Budget) -> Any:
    """Read a safetensors file: a JSON header of names, types, shapes and byte ranges."""
    num_header = int.from_bytes(os.pread(window.fd, 8, 0), "little")
    if num_header > _MAX_HEADER:
        raise CheckpointError("not a checkpoint: its safetensors header would be too large")
    tensors: OrderedDict[str, Tensor] = OrderedDict()
    with parsing("its safetensors header"):
        text = b"".join(map(bytes, read(Record(window.fd, 8, num_header), 0, num_header)))
        budget.spend(_JSON_COST * (text.count(b"{") + text.count(b"[")))
        header = json.loads(text.decode())
        header.pop("__metadata__", None)
        base = end = 8 + num_header
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = entry["data_offsets"]
            shape = tuple(entry["shape"][:65])  # one too many is refused by Tensor
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
