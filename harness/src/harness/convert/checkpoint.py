"""Open a checkpoint: a file, shards with an index, or a torch.distributed.checkpoint folder.

In: a path. Out: a Checkpoint, whose `root` is what was saved, as data; next is choose.py.
Hugging Face's index (`*.safetensors.index.json`, `*.bin.index.json`) says which shard holds a
tensor; a folder's `.metadata` lists the shards of each tensor, which are torch.save archives.
"""

import functools
import io
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from harness.errors import UserError

from .formats import Window, read_legacy, read_safetensors, read_zip
from .tensors import DTYPES, Budget, CheckpointError, Tensor, parsing, row_major
from .unpickle import unpickle

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")  # of checkpoints
_INDEX = re.compile(r"\.(safetensors|bin|pt|pth|ckpt)\.index(\.\w+)?\.json$")
_SHARD = re.compile(r"-\d+-of-(?!0*1\b)\d+")  # one of one is the whole
_MAX_INDEX = 100_000_000  # bytes
_MAX_AXES = 64
_SIGNATURE = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
_MIN_RESULT, _MAX_EXPANSION = 100_000_000, 16  # bytes that any file may lead to; times the source

# What files of others begin with, and what to do with them.
_FOREIGN = {
    rb"version https://git-lfs": "a Git LFS pointer to the file; git lfs pull downloads it",
    rb"\x1f\x8b": "packed with gzip; unpack it first",
    rb"\x89HDF": "HDF5, written by Keras or h5py, not by torch",
    rb"GGUF": "GGUF, written by llama.cpp, not by torch",
    rb'.{8}\{"': "a safetensors file that ends inside its header; copy it again",
    rb"(?i)\s*<(!doctype|html|head|\?xml)": "a web page: its download failed or asks for a login",
    rb"\s*[{\[][\t\n\r -\xff]*\Z": "a JSON file",
    rb"[\t\n\r -\x7f\x81-\xff][\t\n\r -\xff]*\Z": "a text file",
}
# Names of files and their folders that are parts of a network, and what to convert instead.
_PARTS = {
    r"\.distcp$": "a part of a distributed checkpoint; convert its folder",
    r"-\d+-of-(?!0*1\.)\d+\.\w+$": "one of the shards of a network, whose index (*.index.json) is "
    "not beside it; copy that and all shards into one folder, and convert the folder",
}
_RANK = re.compile(r"^(consolidated\.|mp_rank_)\d+")  # of Llama, of Megatron
_DEEPSPEED = "a DeepSpeed folder; run its zero_to_fp32.py and convert the file which that writes"


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder as a whole is one checkpoint, be it of a kind that is refused."""
    has_metadata = os.path.isfile(path / ".metadata") or os.path.isfile(path / "latest")
    return has_metadata or any(path.glob("*zero_pp_rank*")) or bool(_indexes(path))


def _is_index(path: Path) -> bool:
    return bool(_INDEX.search(path.name))


def _indexes(folder: Path) -> list[Path]:
    """Return the indexes of shards in a folder, those of safetensors before others."""
    paths = (path for path in folder.glob("*.json") if _is_index(path) and os.path.isfile(path))
    return sorted(paths, key=lambda path: path.name.partition(".")[2], reverse=True)


def whole(source: str | Path) -> Path:
    """Return the path of the whole checkpoint: for a shard, the index beside it.

    Raises:
        UserError: there is no such file, or it is a part that cannot be joined from here.
    """
    path = Path(source)
    path = path if path.name not in ("", "..") else path.resolve()  # so that it ends in a name
    if not path.exists():
        raise UserError(f"{path} does not exist.")
    if os.path.isfile(path) and _SHARD.search(path.name):
        for index in _indexes(path.parent):
            if f"{path.suffix}.index" in index.name:
                return index
    for pattern, what in _PARTS.items():
        if os.path.isfile(path) and re.search(pattern, str(path.resolve())):
            raise CheckpointError(f"{path}: {what}")
    for part in (path.resolve(), path.resolve().parent):
        others = _RANK.sub(r"\1*", part.name)
        if others != part.name and len(list(part.parent.glob(others))) > 1:
            raise CheckpointError(
                f"{path}: one of the parts into which the network was split; join them with a "
                "script of the project that wrote them"
            )
    return path


def stem_of(source: Path) -> str:
    """Return the name without a checkpoint's suffix; the dots in `loss=0.12` are no suffix."""
    name = _INDEX.sub("", source.name)
    return source.stem if name == source.name and source.suffix in SUFFIXES else name


class Checkpoint:
    """An opened checkpoint: its `kind` in words, and its `root`, what was saved, as data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.budget = Budget()
        self._files: dict[Path, tuple[int, os.stat_result]] = {}
        self._num_unread: dict[Path, int] = {}  # bytes of files of shards
        try:
            with parsing("it"):
                read = self._read_folder if path.is_dir() else functools.partial(self._read, path)
                self.kind, self.root = read()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        for fd, _stat in self._files.values():
            os.close(fd)

    @property
    def max_result(self) -> int:
        """Bytes that may be made of it: more can only come from expanded views."""
        num_bytes = sum(status.st_size for _, status in self._files.values())
        if self.path.is_dir():  # whose shards are opened later
            num_bytes = sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())
        return _MIN_RESULT + _MAX_EXPANSION * num_bytes

    def check_unchanged(self) -> None:
        """Raise if a file was written to or replaced since it was opened."""
        for path, (fd, before) in self._files.items():
            found = (os.fstat(fd), os.stat(path)) if os.path.exists(path) else ()
            is_same = all(
                getattr(now, i) == getattr(before, i) for now in found for i in _SIGNATURE
            )
            if not found or not is_same:
                raise CheckpointError("changed while it was read; convert it again")

    def is_read_from(self, path: Path) -> bool:
        """Whether a path is one of the files that are open."""
        status = path.stat()
        return any(os.path.samestat(status, opened) for _, opened in self._files.values())

    def _open(self, path: Path) -> Window:
        """Open a file once: all reads go through this descriptor, whatever the path becomes."""
        if path not in self._files:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
            self._files[path] = fd, os.fstat(fd)
            self.budget.left += self._files[path][1].st_size
        fd, status = self._files[path]
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name} is not a regular file")
        return Window(fd, 0, status.st_size)

    def _read(self, path: Path) -> tuple[str, Any]:
        window = self._open(path)
        if _is_index(path):
            return self._read_index(path, os.pread(window.fd, _MAX_INDEX, 0))
        head = os.pread(window.fd, 512, 0)
        if not window.size:
            raise CheckpointError("the file is empty; its copy or its training was interrupted")
        # First, since a safetensors file begins with a length, which can be any bytes.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= window.size:
            return "safetensors", read_safetensors(window, self.budget)
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", read_zip(window, self.budget)
        if head.startswith(b"\x80"):
            return "torch.save (legacy)", read_legacy(window, self.budget)
        for pattern, what in _FOREIGN.items():
            if re.match(pattern, head, re.DOTALL):
                raise CheckpointError(f"not a checkpoint: {what}")
        raise CheckpointError("not a checkpoint: neither torch.save's format nor safetensors")

    def _read_index(self, index: Path, text: bytes) -> tuple[str, Any]:
        """Return the tensors of all shards, each of which holds the names that the index says."""
        with parsing(index.name):
            places: dict[str, str] = json.loads(text)["weight_map"]
            files = sorted(set(places.values()))
        if not files or any(Path(file).name != file or _is_index(Path(file)) for file in files):
            raise CheckpointError(f"damaged: {index.name} names no shards beside it")
        if missing := [file for file in files if not (index.parent / file).is_file()]:
            raise CheckpointError(
                f"of the {len(files)} shards that {index.name} names {len(missing)} are missing, "
                f"the first is {missing[0]}; copy or download them again"
            )
        root: dict[str, Any] = {}
        for file in files:
            try:
                shard = self._read(index.parent / file)[1]
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {error}") from error
            wanted = {name for name, place in places.items() if place == file}
            names = set(shard) if isinstance(shard, dict) else set()
            if odd := sorted(map(str, names ^ wanted)):
                raise CheckpointError(
                    f"damaged: {file} does not hold what {index.name} says; they differ by {odd[0]}"
                )
            root |= shard
        return f"{len(files)} shards of {index.name}", root

    def _read_folder(self) -> tuple[str, Any]:
        if (self.path / ".metadata").is_file():
            rest = self.path / "meta.pt"  # where Lightning keeps what is not a tensor
            root = read_zip(self._open(rest), self.budget) if rest.is_file() else {}
            return "torch.distributed.checkpoint", {**root, **self._read_distributed()}
        if paths := _indexes(self.path):
            if len({path.name.partition(".")[2] for path in paths}) < len(paths):
                names = " and ".join(path.name for path in paths)
                raise CheckpointError(f"holds {names}; convert one of them")
            return self._read(paths[0])
        if is_checkpoint_folder(self.path):
            raise CheckpointError(_DEEPSPEED)
        raise CheckpointError("a folder without checkpoints: no .metadata, no checkpoint files")

    def _read_distributed(self) -> dict[str, Any]:
        """Return the saved state, nested as it was; shards are read when they are asked for."""
        self.budget.left += self.max_result // _MAX_EXPANSION
        metadata = unpickle(io.BufferedReader(self._open(self.path / ".metadata")), self.budget)
        root: dict[str, Any] = {}
        with parsing(".metadata"):
            places = {
                _place(index.state["fqn"], index.state.get("offset") or ()): info.state
                for index, info in metadata.state["storage_data"].items()
            }
            paths = metadata.state["planner_data"] or {}
            for name, entry in metadata.state["state_dict_metadata"].items():
                *parents, leaf = map(_text, paths.get(name, (name,))[:_MAX_AXES])
                target = root
                for parent in parents:
                    target = target.setdefault(parent, {})
                is_tensor = entry.name.endswith("TensorStorageMetadata")
                target[leaf] = self._sharded(name, entry.state, places) if is_tensor else None
        return root

    def _sharded(self, name: str, entry: dict[str, Any], places: dict[str, Any]) -> Tensor:
        shape = _numbers(entry["size"])
        dtype = entry["properties"].state[0].removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: element type {dtype} is not known")
        self.budget.spend(Budget.PART_COST * len(entry["chunks"]))
        chunks = [chunk.state for chunk in entry["chunks"]]
        boxes = [(_numbers(chunk["offsets"]), _numbers(chunk["sizes"])) for chunk in chunks]
        boxes = [box for box in boxes if math.prod(box[1])]  # a rank may have had nothing

        def load(position: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
            place = places[_place(name, position)]
            path = self.path / place["relative_path"]
            if path.name != place["relative_path"] or place.get("transform_descriptors"):
                raise CheckpointError(f"{name}: its shard in {path} is compressed or elsewhere")
            if not path.is_file():
                raise CheckpointError(f"{path.name} is missing; copy the whole folder")
            file = self._open(path)
            start, length = place["offset"], place["length"]
            if not 0 <= start <= start + length <= file.size:
                raise CheckpointError(f"truncated: {path.name} ends before the shard of {name}")
            self._num_unread[path] = self._num_unread.get(path, file.size) - length
            if self._num_unread[path] < 0:
                raise CheckpointError(f"damaged: shards in {path.name} overlap")
            shard = read_zip(Window(file.fd, start, length), self.budget)
            if not isinstance(shard, Tensor) or (shard.shape, shard.dtype) != (sizes, dtype):
                raise CheckpointError(f"damaged: a shard of {name} is not what .metadata says")
            return shard

        @functools.cache
        def load_shards() -> list[tuple[tuple[int, ...], Tensor]]:
            with parsing(f"a shard of {name}"):
                return [(position, load(position, sizes)) for position, sizes in boxes]

        return Tensor(dtype, shape, row_major(shape), load_shards=load_shards)


def _numbers(values: Any) -> tuple[int, ...]:
    is_short = len(values) <= _MAX_AXES
    if not is_short or any(type(n) is not int or not 0 <= n < 1 << 63 for n in values):
        raise TypeError("not a place or a size")
    return tuple(values)


def _text(part: Any) -> str:
    if not isinstance(part, str | int) or len(str(part)) > 1_000:
        raise TypeError("not a name")
    return str(part)


def _place(name: Any, position: Any) -> str:
    return f"{_numbers(position)} {_text(name)}"
