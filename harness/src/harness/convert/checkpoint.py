"""Find and open a checkpoint: torch.save's zip, safetensors, or a folder of safetensors shards.

In: a path. Out: a ``Checkpoint``. Its ``root`` is the saved object as plain data, in which a
``StoredTensor`` gives each tensor's bytes in the file. Next: choose.py finds the weights in it.
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

from .tensors import (
    DTYPES,
    Budget,
    ByteRange,
    CheckpointError,
    StoredTensor,
    check,
    parsing,
    row_major,
)
from .unpickle import Inert, InertUnpickler

_END = 22  # bytes of a zip's last record, which torch writes without a comment
_MAX_DIRECTORY = 2**24  # bytes of a zip's list of entries: 200,000 tensors
_MAX_REPEATED = 2**27  # bytes by which expanded views may exceed the stored bytes
_MAX_DEPTH = 100  # of nested lists and dicts
_SHARD = re.compile(r"-\d+-of-(?!0*1\.)\d+\.\w+$")  # shard 1 of 1 is a full file
_RANK = re.compile(r"((mp|pp)_rank_|consolidated\.)\d+")  # shards of DeepSpeed and Llama
_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}


def shards_in(folder: Path) -> list[Path]:
    """Return a folder's shards of one network, if all of them exist under Hugging Face's names."""
    paths = sorted(folder.glob("*-of-*.safetensors"))
    return paths if paths and paths[0].stem.endswith(f"-of-{len(paths):05}") else []


def resolve_source(source: str | Path) -> Path:
    """Return the path to open: a file, a folder of shards, or a run folder's best checkpoint.

    Raises:
        UserError: the path does not exist.
        CheckpointError: the path is one shard of a network, or a folder that cannot be converted.
    """
    path = Path(source)
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if _SHARD.search(path.name) or _is_one_of_several(path):
        raise CheckpointError(
            f"{path} is one shard of a network, judging by its name. If the shards are "
            ".safetensors, convert their folder. Otherwise load all shards with the program that "
            "wrote them, and torch.save the full state_dict"
        )
    if (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path} is a folder of torch.distributed.checkpoint. If you trust its source, turn "
            "the folder into a file, and convert that file: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE"
        )
    if path.is_file() or shards_in(path):
        return path
    if best := best_checkpoint(path):
        return best
    raise CheckpointError(
        f"{path} is neither a checkpoint file, nor a run's folder, nor a folder with all shards of "
        "a network. Name a file"
    )


def _is_one_of_several(path: Path) -> bool:
    """Return whether a file is one rank's shard of a network.

    Its name then has the rank's number, and the files of other ranks are in the same folder. A
    single mp_rank_00_model_states.pt, as ZeRO-1 and -2 write it, holds all weights.
    """
    name = _RANK.sub(r"\1", path.name)
    return name != path.name and (
        path.name.startswith("zero_pp_rank_")  # ZeRO-3, even if there is one rank
        or sum(_RANK.sub(r"\1", other.name) == name for other in path.parent.iterdir()) > 1
    )


class Checkpoint(ExitStack):
    """An open checkpoint: ``kind`` names its format, ``root`` is the saved object as data."""

    def __init__(self, path: Path, allowance: int = 0) -> None:
        super().__init__()
        self.path = path
        self.budget = Budget()
        self.budget.left += allowance
        self.num_bytes = 0  # of all its files
        self._files: list[tuple[BinaryIO, os.stat_result]] = []
        try:
            with parsing():
                (self.kind, self.root), *shards = map(self._read, shards_in(path) or [path])
                for _, shard in shards:
                    if self.root.keys() & shard.keys():
                        raise CheckpointError("damaged: two shards hold tensors of the same name")
                    self.root |= shard
        except BaseException:
            self.close()
            raise

    def check_size(self) -> None:
        """Raise if all objects of the file would take far more memory than the file has bytes.

        An object that the file names twice counts twice. So do elements that a view repeats.
        """
        level, num_repeated = [self.root], 0  # bytes that views repeat
        for _ in range(_MAX_DEPTH):
            inner: list[Any] = []
            for node in level:
                children: Any = node if isinstance(node, list | tuple) else ()
                if isinstance(node, StoredTensor):
                    num_repeated += max(0, node.num_bytes - node.record.num_bytes)
                elif isinstance(node, Inert):
                    children = (node.state,)
                elif isinstance(node, dict):
                    children = (*node, *node.values())
                self.budget.spend(Budget.OPCODE * len(children))
                inner += children
            level = inner
        if num_repeated > _MAX_REPEATED:
            raise CheckpointError(
                f"damaged: views in it repeat their elements up to {num_repeated / 1e9:,.1f} GB"
            )
        if level:
            raise CheckpointError(f"damaged: nested more than {_MAX_DEPTH} levels deep")

    def check_unchanged(self) -> None:
        """Raise if one of the files has changed since it was opened."""
        for file, before in self._files:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise CheckpointError("the file changed while it was read. Convert it again")

    def _read(self, path: Path) -> tuple[str, Any]:
        """Open and read a file. Later reads use the same descriptor, even if its path changes."""
        file = self.enter_context(path.open("rb"))
        status = os.fstat(file.fileno())
        self._files.append((file, status))
        self.num_bytes += status.st_size
        self.budget.left += status.st_size
        head = os.pread(file.fileno(), 40, 0)
        # Try safetensors first: it begins with a length, whose bytes may look like another format.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= status.st_size:
            return "safetensors", _read_safetensors(file.fileno(), status.st_size, self.budget)
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", _read_zip(file, status.st_size, self.budget)
        raise CheckpointError(
            "the file is not a checkpoint, or is damaged. It is neither safetensors nor a zip "
            f"file of torch.save (torch 1.6 or newer), and begins with {head!r}"
        )


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raise if a zip lists too many entries, because each takes half a kilobyte in Python."""
    end = os.pread(file.fileno(), _END + 76, max(0, size - _END - 76))
    num_bytes = int.from_bytes(end[-10:-6], "little")  # of the list
    if num_bytes == 0xFFFFFFFF:  # zip64: a longer record before this one holds the number
        num_bytes = int.from_bytes(end[40:48], "little")
    if num_bytes > _MAX_DIRECTORY:
        raise CheckpointError("damaged: it lists more entries than a network has tensors")


def _read_zip(file: BinaryIO, size: int, budget: Budget) -> Any:
    """Return the object in data.pkl of torch.save's zip, which has an entry for each storage."""
    _check_directory(file, size)
    entries = zipfile.ZipFile(file).infolist()
    infos = {entry.filename.partition("/")[2]: entry for entry in entries}
    if "data.pkl" not in infos or "constants.pkl" in infos or len(infos) != len(entries):
        raise CheckpointError(
            "the zip file is not from torch.save. If it is from TorchScript, save its state_dict "
            "with torch.save instead"
        )
    if any(info.compress_type or info.compress_size != info.file_size for info in entries):
        raise CheckpointError(
            "the file was zipped again with compression. Unzip it, and zip it with: zip -0 -r"
        )
    if sum(info.file_size for info in entries) > size:
        raise CheckpointError("truncated, or damaged: its entries are larger than the file")
    # torch.serialization.set_crc32_options(False) leaves every checksum zero.
    has_crcs = any(info.CRC for info in entries)
    records: dict[str, ByteRange] = {}

    def record(name: str) -> ByteRange:
        if name in records:
            return records[name]
        info = infos[name]
        header = os.pread(file.fileno(), 30, info.header_offset)
        start = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:]))
        if not header.startswith(b"PK\3\4") or start + info.file_size > size:
            raise CheckpointError(f"damaged: {name} is not where the zip's directory puts it")
        crc = info.CRC if has_crcs else None
        return records.setdefault(name, ByteRange(file.fileno(), start, info.file_size, crc))

    def record_of(key: str, num_bytes: int) -> ByteRange:
        found = record(f"data/{key}")
        if found.num_bytes != num_bytes:
            raise CheckpointError(f"damaged: data/{key} does not have its tensor's length")
        return found

    if "byteorder" in infos and os.pread(file.fileno(), 3, record("byteorder").offset) != b"lit":
        raise CheckpointError(
            "the file was saved on a big-endian machine. Save it as .safetensors there"
        )
    pickled = record("data.pkl")
    check(pickled, "data.pkl")
    file.seek(pickled.offset)
    return InertUnpickler(file, record_of, budget).load()


def _read_safetensors(fd: int, size: int, budget: Budget) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Its JSON header has types, shapes, byte ranges."""
    num_header = int.from_bytes(os.pread(fd, 8, 0), "little")
    text = os.pread(fd, num_header, 8)
    budget.spend(Budget.CONTAINER * (text.count(b"{") + text.count(b"[")))
    header = json.loads(text)
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    base = end = 8 + num_header
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"][:65])  # Tensor refuses more than 64 axes
        if entry["dtype"] not in _SAFETENSORS:
            raise CheckpointError(f"{name}: element type {entry['dtype']} is not supported")
        record = ByteRange(fd, base + start, stop - start)
        tensor = StoredTensor(_SAFETENSORS[entry["dtype"]], shape, row_major(shape), 0, record)
        if base + start != end or tensor.num_bytes != stop - start:
            raise CheckpointError(f"damaged: the bytes of {name} leave a gap or overlap others")
        tensors[name], end = tensor, base + stop
    if end != size:
        raise CheckpointError("truncated: the tensors reach past the end of the file")
    return tensors
