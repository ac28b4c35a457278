"""Find and open a checkpoint: torch.save's zip, safetensors, or a folder of safetensors shards.

In: a path. Out: a Checkpoint, whose `root` is what was saved, as data with Tensors for places in
the file; next is choose.py.
"""

import json
import os
import re
import struct
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import UserError
from harness.files import best_checkpoint

from .tensors import DTYPES, Budget, CheckpointError, Record, Tensor, check, parsing, row_major
from .unpickle import Inert, InertUnpickler

_END = 22  # bytes of a zip's last record, which torch writes without a comment
_MAX_DIRECTORY = 2**24  # bytes of a zip's list of entries: 200,000 tensors
_MAX_REPEATED = 2**27  # bytes that expanded views may have more than is stored
_MAX_DEPTH = 100  # of lists and dicts in each other
_SHARD = re.compile(r"-\d+-of-(?!0*1\.)\d+\.\w+$")  # one of one is the whole
_RANK = re.compile(r"(mp_rank_|consolidated\.)\d\d")  # as Megatron, DeepSpeed and Llama name shares
_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}


def shards_in(folder: Path) -> list[Path]:
    """Return the files that together are one network, as Hugging Face names them."""
    paths = sorted(folder.glob("*-of-*.safetensors"))
    return paths if paths and paths[0].stem.endswith(f"-of-{len(paths):05}") else []


def whole(source: str | Path) -> Path:
    """Return what to open: of a run's folder its best checkpoint.

    Raises:
        UserError: there is no such file.
        CheckpointError: it is a part of a network, or a folder in which a file must be named.
    """
    path = Path(source)
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    rank = _RANK.search(path.name)
    if _SHARD.search(path.name) or (rank and len([*path.parent.glob(f"*{rank[1]}*")]) > 1):
        raise CheckpointError(
            f"{path}: a part of a network, by its name; convert the folder with all parts, or, "
            "if they are no safetensors, load them with what wrote them and torch.save the whole"
        )
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path}: a folder of torch.distributed.checkpoint; if you trust it, make it a file: "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE"
        )
    if path.is_file() or shards_in(path):
        return path
    if best := best_checkpoint(path):
        return best
    raise CheckpointError(
        f"{path}: a folder that is no checkpoint itself, or no file at all; name a file"
    )


class Checkpoint(ExitStack):
    """An opened checkpoint: its `kind` in words, and its `root`, what was saved, as data."""

    def __init__(self, path: Path, allowance: int = 0) -> None:
        super().__init__()
        self.path = path
        self.budget = Budget()
        self.budget.left += allowance
        self.num_bytes = 0  # of its files
        self._files: list[tuple[BinaryIO, os.stat_result]] = []
        try:
            with parsing():
                (self.kind, self.root), *shards = map(self._read, shards_in(path) or [path])
                for _, shard in shards:
                    if self.root.keys() & shard.keys():
                        raise CheckpointError("damaged: two shards hold tensors of one name")
                    self.root |= shard
        except BaseException:
            self.close()
            raise

    def check_size(self) -> None:
        """Raise if a program that builds every object of the file needs far more than its size.

        What the file names twice counts twice, and so does what a view repeats.
        """
        level, repeated = [self.root], 0  # bytes that views repeat
        for _ in range(_MAX_DEPTH):
            inner: list[Any] = []
            for node in level:
                inside: Any = node if isinstance(node, list | tuple) else ()
                if isinstance(node, Tensor):
                    repeated += max(0, node.num_bytes - node.record.num_bytes)
                elif isinstance(node, Inert):
                    inside = (node.state,)
                elif isinstance(node, dict):
                    inside = (*node, *node.values())
                self.budget.spend(Budget.OPCODE * len(inside))
                inner += inside
            level = inner
        if repeated > _MAX_REPEATED:
            raise CheckpointError(f"damaged: its tensors repeat {repeated / 1e9:,.1f} GB")
        if level:
            raise CheckpointError(f"damaged: nested more than {_MAX_DEPTH} levels deep")

    def check_unchanged(self) -> None:
        """Raise if a file was written to since it was opened."""
        for file, before in self._files:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise CheckpointError("changed while it was read; convert it again")

    def _read(self, path: Path) -> tuple[str, Any]:
        """Open a file once: all reads go through this descriptor, whatever the path becomes."""
        file = self.enter_context(path.open("rb"))
        status = os.fstat(file.fileno())
        self._files.append((file, status))
        self.num_bytes += status.st_size
        self.budget.left += status.st_size
        head = os.pread(file.fileno(), 40, 0)
        # First, since a safetensors file begins with a length, which can be any bytes.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= status.st_size:
            return "safetensors", _read_safetensors(file.fileno(), status.st_size, self.budget)
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", _read_zip(file, status.st_size, self.budget)
        raise CheckpointError(
            "not a checkpoint, or a damaged one: neither safetensors nor the zip of torch.save "
            f"(1.6 and later); it begins with {head!r}"
        )


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raise if a zip lists more entries than a network has tensors: each takes half a kilobyte."""
    end = os.pread(file.fileno(), _END + 76, max(0, size - _END - 76))
    num_bytes = int.from_bytes(end[-10:-6], "little")  # of the list
    if num_bytes == 0xFFFFFFFF:  # of a large file, where a longer record is before this one
        num_bytes = int.from_bytes(end[40:48], "little")
    if num_bytes > _MAX_DIRECTORY:
        raise CheckpointError("damaged: its list of entries is longer than that of any network")


def _read_zip(file: BinaryIO, size: int, budget: Budget) -> Any:
    """Read torch.save's zip: data.pkl beside one stored record per storage."""
    _check_directory(file, size)
    entries = zipfile.ZipFile(file).infolist()
    infos = {entry.filename.partition("/")[2]: entry for entry in entries}
    if "data.pkl" not in infos or "constants.pkl" in infos or len(infos) != len(entries):
        raise CheckpointError("a zip, but none of torch.save; TorchScript holds a program")
    if any(info.compress_type or info.compress_size != info.file_size for info in entries):
        raise CheckpointError("zipped again with compression; unzip it and `zip -0 -r` it")
    if sum(info.file_size for info in entries) > size:
        raise CheckpointError("truncated, or damaged: its entries are larger than the file")
    # torch.serialization.set_crc32_options(False) leaves every checksum zero.
    has_crcs = any(info.CRC for info in entries)
    records: dict[str, Record] = {}

    def record(name: str) -> Record:
        if name in records:
            return records[name]
        info = infos[name]
        header = os.pread(file.fileno(), 30, info.header_offset)
        start = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:]))
        if not header.startswith(b"PK\3\4") or start + info.file_size > size:
            raise CheckpointError(f"damaged: {name} is not where the directory says")
        crc = info.CRC if has_crcs else None
        return records.setdefault(name, Record(file.fileno(), start, info.file_size, crc))

    def record_of(key: str, num_bytes: int) -> Record:
        found = record(f"data/{key}")
        if found.num_bytes != num_bytes:
            raise CheckpointError(f"damaged: data/{key} is not as long as its tensor says")
        return found

    if "byteorder" in infos and os.pread(file.fileno(), 3, record("byteorder").offset) != b"lit":
        raise CheckpointError("saved on a big-endian machine; save it there as .safetensors")
    pickled = record("data.pkl")
    check(pickled, "data.pkl")
    file.seek(pickled.offset)
    return InertUnpickler(file, record_of, budget).load()


def _read_safetensors(fd: int, size: int, budget: Budget) -> dict[str, Tensor]:
    """Read a safetensors file: a JSON header of names, types, shapes and byte ranges."""
    num_header = int.from_bytes(os.pread(fd, 8, 0), "little")
    text = os.pread(fd, num_header, 8)
    budget.spend(Budget.CONTAINER * (text.count(b"{") + text.count(b"[")))
    header = json.loads(text)
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    base = end = 8 + num_header
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"][:65])  # one too many is refused by Tensor
        if entry["dtype"] not in _SAFETENSORS:
            raise CheckpointError(f"{name}: element type {entry['dtype']} is not known")
        record = Record(fd, base + start, stop - start)
        tensor = Tensor(_SAFETENSORS[entry["dtype"]], shape, row_major(shape), 0, record)
        if base + start != end or tensor.num_bytes != stop - start:
            raise CheckpointError(f"damaged: the bytes of {name} are not where they should be")
        tensors[name], end = tensor, base + stop
    if end != size:
        raise CheckpointError("truncated: the tensors reach past the end of the file")
    return tensors
