"""Open a checkpoint of any format, and know whether it changed while it was read.

A folder of torch.distributed.checkpoint (FSDP, Lightning's sharded strategies) has a `.metadata`
that lists each tensor's shards; each shard is a torch.save archive inside a `.distcp` file.
"""

import functools
import io
import math
import os
import stat
from pathlib import Path
from typing import Any

from .formats import Window, read_legacy, read_safetensors, read_zip
from .sources import MAX_INDEX, foreign, indexes, is_checkpoint_folder, is_index, read_index
from .tensors import DTYPES, Budget, CheckpointError, Tensor, parsing, row_major
from .unpickle import unpickle

Shard = tuple[tuple[int, ...], Tensor]
_IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
LEAST_RESULT = 100_000_000  # bytes that any file may lead to
MAX_EXPANSION = 16  # times the source
_MAX_DEPTH = 64  # of names and of shapes in .metadata


class Checkpoint:
    """An opened checkpoint: its `kind` in words, and its `root`, what was saved, as data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.budget = Budget()
        self._files: dict[Path, tuple[int, os.stat_result]] = {}
        self._num_unread: dict[Path, int] = {}  # bytes of files of shards
        try:
            with parsing("it"):
                self.kind, self.root = (
                    self._read_folder() if path.is_dir() else self._read_file(path)
                )
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        for fd, _stat in self._files.values():
            os.close(fd)

    @property
    def num_bytes(self) -> int:
        """Bytes of the open files, or of all in a folder, some of which are opened later."""
        if self.path.is_dir():
            return sum(path.stat().st_size for path in self.path.iterdir() if path.is_file())
        return sum(status.st_size for _, status in self._files.values())

    @property
    def max_result(self) -> int:
        """Bytes that may be made of it: more is explained by expanded views alone."""
        return LEAST_RESULT + MAX_EXPANSION * self.num_bytes

    def check_unchanged(self) -> None:
        """Raise if a file was written to or replaced since it was opened."""
        for path, (fd, before) in self._files.items():
            found = (os.fstat(fd), os.stat(path)) if os.path.exists(path) else ()
            is_same = all(getattr(now, i) == getattr(before, i) for now in found for i in _IDENTITY)
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
        fd, status = self._files[path]
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name} is not a regular file")
        return Window(fd, 0, status.st_size)

    def _read_file(self, path: Path) -> tuple[str, Any]:
        window = self._open(path)
        if is_index(path):
            text = os.pread(window.fd, MAX_INDEX, 0)
            root = read_index(path, text, lambda shard: self._read_file(shard)[1])
            return f"{len(self._files) - 1} shards of {path.name}", root
        head = os.pread(window.fd, 512, 0)
        if not window.size:
            raise CheckpointError("the file is empty; its copy or its training was interrupted")
        # Before the others: a safetensors file begins with a length, which can be any bytes.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= window.size:
            return "safetensors", read_safetensors(window, self.budget)
        if other := foreign(head):
            raise CheckpointError(f"not a checkpoint: {other}")
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", read_zip(window, self.budget)
        if head.startswith(b"\x80"):
            return "torch.save (legacy)", read_legacy(window, self.budget)
        raise CheckpointError("not a checkpoint: neither torch.save's format nor safetensors")

    def _read_folder(self) -> tuple[str, Any]:
        if (self.path / ".metadata").is_file():
            rest = self.path / "meta.pt"  # where Lightning keeps what is not a tensor
            root = read_zip(self._open(rest), self.budget) if rest.is_file() else {}
            return "torch.distributed.checkpoint", {**root, **self._read_distributed()}
        if paths := indexes(self.path):
            if len({path.name.partition(".")[2] for path in paths}) < len(paths):
                names = " and ".join(path.name for path in paths)
                raise CheckpointError(f"holds {names}; convert one of them")
            return self._read_file(paths[0])
        if is_checkpoint_folder(self.path):
            raise CheckpointError(
                "a DeepSpeed folder; run its zero_to_fp32.py and convert the file which that writes"
            )
        raise CheckpointError("a folder without checkpoints: no .metadata, no checkpoint files")

    def _read_distributed(self) -> dict[str, Any]:
        """Return the saved state, nested as it was; shards are read when they are asked for."""
        file = io.BufferedReader(self._open(self.path / ".metadata"))
        metadata = unpickle(file, budget=self.budget)
        root: dict[str, Any] = {}
        with parsing(".metadata"):
            places = {
                _place(index.state["fqn"], index.state.get("offset") or ()): info.state
                for index, info in metadata.state["storage_data"].items()
            }
            paths = metadata.state["planner_data"] or {}
            for name, entry in metadata.state["state_dict_metadata"].items():
                path = paths.get(name, (name,))
                if len(path) > _MAX_DEPTH:
                    raise TypeError("not a name")
                self.budget.spend(8 * len(path))
                *parents, leaf = map(_text, path)
                target = root
                for parent in parents:
                    target = target.setdefault(parent, {})
                is_tensor = entry.name.endswith("TensorStorageMetadata")
                target[leaf] = self._sharded(name, entry.state, places) if is_tensor else None
        return root

    def _sharded(self, name: str, entry: dict[str, Any], places: dict[Any, Any]) -> Tensor:
        shape = _numbers(entry["size"])
        dtype = entry["properties"].state[0].removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: element type {dtype} is not known")
        chunks = [chunk.state for chunk in entry["chunks"]]
        self.budget.spend(16 * len(chunks))
        boxes = [(_numbers(chunk["offsets"]), _numbers(chunk["sizes"])) for chunk in chunks]
        boxes = [box for box in boxes if math.prod(box[1])]  # a rank may have had nothing
        for position, sizes in boxes:
            if any(p + n > most for p, n, most in zip(position, sizes, shape, strict=True)):
                raise CheckpointError(f"damaged: the shards of {name} do not make up the tensor")

        @functools.cache
        def load_shards() -> list[Shard]:
            with parsing(f"a shard of {name}"):
                return [load(position, sizes) for position, sizes in boxes]

        def load(position: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
            place = places[_place(name, position)]
            path = self.path / place["relative_path"]
            if path.name != place["relative_path"] or place.get("transform_descriptors"):
                raise CheckpointError(f"{name}: its shard in {path} is compressed or elsewhere")
            if not path.is_file():
                raise CheckpointError(f"{path.name} is missing; copy the whole folder")
            whole = self._open(path)
            start, length = place["offset"], place["length"]
            if not 0 <= start <= start + length <= whole.size:
                raise CheckpointError(f"truncated: {path.name} ends before the shard of {name}")
            self._num_unread[path] = self._num_unread.get(path, whole.size) - length
            if self._num_unread[path] < 0:
                raise CheckpointError(f"damaged: shards in {path.name} overlap")
            shard = read_zip(Window(whole.fd, start, length), self.budget)
            if not isinstance(shard, Tensor) or (shard.shape, shard.dtype) != (sizes, dtype):
                raise CheckpointError(f"damaged: a shard of {name} is not what .metadata says")
            return position, shard

        return Tensor(dtype, shape, row_major(shape), load_shards=load_shards)


def _numbers(values: Any) -> tuple[int, ...]:
    """Return a place or a size: what is used often must not be long."""
    is_short = len(values) <= _MAX_DEPTH
    if not is_short or any(type(n) is not int or not 0 <= n < 1 << 63 for n in values):
        raise TypeError("not a place or a size")
    return tuple(values)


def _text(part: Any) -> str:
    """Return a part of a name, by the same rule."""
    if not isinstance(part, str | int) or len(str(part)) > 1_000:
        raise TypeError("not a name")
    return str(part)


def _place(name: Any, position: Any) -> str:
    return f"{_numbers(position)} {_text(name)}"
