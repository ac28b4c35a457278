"""Find and open a checkpoint: torch.save's zip, safetensors, or shards of these with an index.

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

from .stream import check, read
from .tensors import DTYPES, Budget, CheckpointError, Record, Tensor, parsing, row_major
from .unpickle import unpickle

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of checkpoints
_INDEX = re.compile(r"\.(safetensors|bin)\.index\.json$")  # as Hugging Face writes it
_SHARD = re.compile(r"-\d+-of-(?!0*1\.)\d+\.\w+$")  # one of one is the whole
_RANK = re.compile(r"(mp_rank_|consolidated\.)\d\d")  # as Megatron, DeepSpeed and Llama name shares
_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items() if dtype.safetensors}
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors format

# What files that are no checkpoints begin with.
_OTHERS = {
    rb"version https://git-lfs": "a Git LFS pointer to the file; git lfs pull downloads it",
    rb"(?i)\s*<(!doctype|html|head|\?xml)": "a web page: its download failed or asks for a login",
    rb"\x80\x02\x8a\nl\xfc\x9cF": "the format of before torch 1.6; torch.load it, and torch.save "
    "what that gives",
    rb"\x80": "a pickle that torch.save did not write; torch.save its tensors",
}


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder as a whole is one checkpoint, be it of a kind that is refused."""
    return (path / ".metadata").is_file() or _index_in(path) is not None


def _index_in(folder: Path) -> Path | None:
    """Return the index of shards in a folder, if there is one of a kind."""
    for kind in ("safetensors", "bin"):
        paths = [*folder.glob(f"*.{kind}.index.json")]
        if len(paths) == 1:
            return paths[0]
    return None


def whole(source: str | Path) -> Path:
    """Return the file to open: for a shard the index beside it, for a run's folder its best.

    Raises:
        UserError: there is no such file.
        CheckpointError: it is a part of a network, or a folder in which a file must be named.
    """
    path = Path(source)
    path = path if path.name not in ("", "..") else path.resolve()  # so that it ends in a name
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if path.is_dir():
        return _file_in(path)
    if (rank := _RANK.search(path.name)) and len([*path.parent.glob(f"*{rank[1]}*")]) > 1:
        raise CheckpointError(
            f"{path}: one process's share of a network, by its name; merge all shares with the "
            "program that wrote them"
        )
    if not _SHARD.search(path.name):
        return path
    if index := _index_in(path.parent):
        return index
    raise CheckpointError(
        f"{path}: one of the shards of a network, whose index (*.index.json) is not beside it; "
        "copy that and all shards into one folder, and convert the folder"
    )


def _file_in(folder: Path) -> Path:
    if (folder / ".metadata").is_file():
        raise CheckpointError(
            f"{folder}: a folder of torch.distributed.checkpoint; if you trust it, make it a "
            f"file: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE"
        )
    if index := _index_in(folder):
        return index
    if (best := folder / "checkpoints" / "best.ckpt").is_file():
        return best
    paths = (path for pattern in ("*", "checkpoints/*") for path in sorted(folder.glob(pattern)))
    names = [str(path) for path in paths if path.suffix in SUFFIXES and path.is_file()][:5]
    there = f"name a file in it: {' or '.join(names)}" if names else "no checkpoint lies in it"
    raise CheckpointError(f"{folder}: a folder that is no checkpoint itself; {there}")


def stem_of(source: Path) -> str:
    """Return the name without a checkpoint's suffix; the dots in `loss=0.12` are no suffix."""
    name = _INDEX.sub("", source.name)
    return source.stem if name == source.name and source.suffix in SUFFIXES else name


class Checkpoint(ExitStack):
    """An opened checkpoint: its `kind` in words, and its `root`, what was saved, as data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.budget = Budget()
        self._files: list[tuple[BinaryIO, os.stat_result]] = []
        try:
            with parsing("it"):
                is_index = bool(_INDEX.search(path.name))
                self.kind, self.root = self._read_index(path) if is_index else self._read(path)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(status.st_size for _, status in self._files)

    def check_unchanged(self) -> None:
        """Raise if a file was written to since it was opened."""
        for file, before in self._files:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise CheckpointError("changed while it was read; convert it again")

    def _open(self, path: Path) -> tuple[BinaryIO, int]:
        """Open a file once: all reads go through this descriptor, whatever the path becomes."""
        if not path.is_file():  # opening a pipe would wait for somebody to write into it
            raise CheckpointError(f"{path.name} is missing, or not a regular file")
        file = self.enter_context(path.open("rb"))
        status = os.fstat(file.fileno())
        self._files.append((file, status))
        self.budget.left += status.st_size
        return file, status.st_size

    def _read(self, path: Path) -> tuple[str, Any]:
        file, size = self._open(path)
        head = os.pread(file.fileno(), 512, 0)
        if not size:
            raise CheckpointError("the file is empty; its copy or its training was interrupted")
        # First, since a safetensors file begins with a length, which can be any bytes.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size:
            return "safetensors", _read_safetensors(file.fileno(), size, self.budget)
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", _read_zip(file, size, self.budget)
        for pattern, what in _OTHERS.items():
            if re.match(pattern, head, re.DOTALL):
                raise CheckpointError(f"not a checkpoint that can be read: {what}")
        raise CheckpointError(
            "not a checkpoint, or a damaged one: neither torch.save's format nor safetensors"
        )

    def _read_index(self, index: Path) -> tuple[str, Any]:
        """Return the tensors of all shards, each of which holds the names that the index says."""
        file, size = self._open(index)
        with parsing(index.name):
            places = _json(Record(file.fileno(), 0, size), self.budget)["weight_map"]
            names: list[str] = sorted(set(places.values()))
        if not names or any(Path(name).name != name for name in names):
            raise CheckpointError(f"damaged: {index.name} names no shards beside it")
        root: dict[str, Any] = {}
        for name in names:
            try:
                shard = self._read(index.parent / name)[1]
            except CheckpointError as error:
                raise CheckpointError(f"{name}: {error}") from error
            wanted = {tensor for tensor, place in places.items() if place == name}
            if not isinstance(shard, dict) or shard.keys() != wanted:
                raise CheckpointError(f"damaged: {name} does not hold what {index.name} says")
            root |= shard
        return f"{len(names)} shards of {index.name}", root


def _read_zip(file: BinaryIO, size: int, budget: Budget) -> Any:
    """Read torch.save's zip: data.pkl beside one stored record per storage."""
    with parsing("its zip directory, perhaps because it is truncated,"):
        entries = zipfile.ZipFile(file).infolist()
    infos = {entry.filename.partition("/")[2]: entry for entry in entries}
    if "constants.pkl" in infos:
        raise CheckpointError("a TorchScript program, not weights; torch.jit.load opens it")
    if "data.pkl" not in infos or len(infos) != len(entries):
        raise CheckpointError("a zip, but not one that torch.save writes: no data.pkl of its own")
    if sum(info.compress_size for info in entries) > size:
        raise CheckpointError("truncated, or damaged: its entries are larger than the file")
    # torch.serialization.set_crc32_options(False) leaves every checksum zero.
    has_crcs = any(info.CRC for info in entries)

    def record(name: str) -> Record:
        info = infos[name]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError("zipped again with compression; unzip it and `zip -0 -r` it")
        with parsing(name):
            header = os.pread(file.fileno(), 30, info.header_offset)
            if not header.startswith(b"PK\3\4"):
                raise ValueError("no header")
        start = info.header_offset + 30 + sum(struct.unpack("<2H", header[26:]))
        if start + info.file_size > size:
            raise CheckpointError(f"truncated: {name} reaches past the end of the file")
        return Record(file.fileno(), start, info.file_size, info.CRC if has_crcs else None)

    if "byteorder" in infos:
        order = record("byteorder")
        if os.pread(order.fd, 9, order.offset)[: order.num_bytes] != b"little":
            raise CheckpointError("saved on a big-endian machine; save it there as .safetensors")
    records: dict[str, Record] = {}

    def record_of(key: str, itemsize: int, numel: int) -> Record:
        if key not in records:
            records[key] = record(f"data/{key}")
        if records[key].num_bytes != itemsize * numel:
            raise CheckpointError(f"damaged: data/{key} is not as long as its tensor says")
        return records[key]

    pickled = record("data.pkl")
    check(pickled, "data.pkl")
    file.seek(pickled.offset)
    return unpickle(file, budget, record_of)


def _read_safetensors(fd: int, size: int, budget: Budget) -> dict[str, Tensor]:
    """Read a safetensors file: a JSON header of names, types, shapes and byte ranges."""
    num_header = int.from_bytes(os.pread(fd, 8, 0), "little")
    tensors: dict[str, Tensor] = {}
    with parsing("its safetensors header"):
        header = _json(Record(fd, 8, num_header), budget)
        header.pop("__metadata__", None)
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


def _json(record: Record, budget: Budget) -> Any:
    if record.num_bytes > _MAX_HEADER:
        raise CheckpointError("not a checkpoint: its header would be too large")
    text = b"".join(map(bytes, read(record, 0, record.num_bytes)))
    budget.spend(Budget.CONTAINER * (text.count(b"{") + text.count(b"[")))
    return json.loads(text)
