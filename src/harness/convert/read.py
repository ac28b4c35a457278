"""Open a checkpoint of any format, and know whether it changed while it was read.

A folder of torch.distributed.checkpoint (FSDP, Lightning's sharded strategies) has a `.metadata`
that lists each tensor's shards; each shard is a torch.save archive inside a `.distcp` file.
"""

import functools
import io
import math
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Any

from .formats import Window, read_legacy, read_safetensors, read_zip
from .tensors import DTYPES, CheckpointError, Tensor, parsing, row_major
from .unpickle import unpickle

Shard = tuple[tuple[int, ...], Tensor]
_IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
_MAX_DEPTH = 100  # of names and of shapes in .metadata


def is_checkpoint_folder(path: Path) -> bool:
    """Whether a folder as a whole is one checkpoint, be it of a kind that is refused."""
    has_index = (path / ".metadata").is_file() or (path / "latest").is_file()
    return has_index or any(path.glob("*zero_pp_rank*"))


class Checkpoint:
    """An opened checkpoint: its `kind` in words, and its `root`, what was saved, as data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[Path, tuple[int, os.stat_result]] = {}
        try:
            with parsing("it"):
                self.kind, self.root = self._read_folder() if path.is_dir() else self._read_file()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        for fd, _stat in self._files.values():
            os.close(fd)

    def check_unchanged(self) -> None:
        """Raise if a file was written to or replaced since it was opened."""
        for path, (fd, before) in self._files.items():
            for now in (os.fstat(fd), os.stat(path)):
                if any(getattr(now, name) != getattr(before, name) for name in _IDENTITY):
                    raise CheckpointError("changed while it was read; convert it again")

    def _open(self, path: Path) -> Window:
        """Open a file once: all reads go through this descriptor, whatever the path becomes."""
        if path not in self._files:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for its writer
            self._files[path] = fd, os.fstat(fd)
        fd, status = self._files[path]
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path.name} is not a regular file")
        return Window(fd, 0, status.st_size)

    def _read_file(self) -> tuple[str, Any]:
        window = self._open(self.path)
        head = os.pread(window.fd, 16, 0)
        if not window.size:
            raise CheckpointError("the file is empty; its copy or its training was interrupted")
        # Before the others: a safetensors file begins with a length, which can be any bytes.
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= window.size:
            return "safetensors", read_safetensors(window)
        if head.startswith(b"PK\x03\x04"):
            return "torch.save", read_zip(window)
        if head.startswith(b"\x80"):
            return "torch.save (legacy)", read_legacy(window)
        raise CheckpointError("not a checkpoint: neither torch.save's format nor safetensors")

    def _read_folder(self) -> tuple[str, Any]:
        if (self.path / ".metadata").is_file():
            rest = self.path / "meta.pt"  # where Lightning keeps what is not a tensor
            root = read_zip(self._open(rest)) if rest.is_file() else {}
            return "torch.distributed.checkpoint", {**root, **self._read_distributed()}
        if is_checkpoint_folder(self.path):
            raise CheckpointError(
                "a DeepSpeed folder; run its zero_to_fp32.py and convert the file which that writes"
            )
        raise CheckpointError("a folder without checkpoints: no .metadata, no checkpoint files")

    def _read_distributed(self) -> dict[str, Any]:
        """Return the saved state, nested as it was; shards are read when they are asked for."""
        metadata = unpickle(io.BufferedReader(self._open(self.path / ".metadata")))
        root: OrderedDict[str, Any] = OrderedDict()
        with parsing(".metadata"):
            places = {
                (_part(index.state["fqn"]), *_numbers(index.state.get("offset") or ())): info.state
                for index, info in metadata.state["storage_data"].items()
            }
            paths = metadata.state["planner_data"] or {}
            for name, entry in metadata.state["state_dict_metadata"].items():
                path = paths.get(name, (name,))
                if len(path) > _MAX_DEPTH:
                    raise TypeError("not a name")
                *parents, leaf = map(_part, path)
                target = root
                for parent in parents:
                    target = target.setdefault(parent, OrderedDict())
                is_tensor = entry.name.endswith("TensorStorageMetadata")
                target[leaf] = self._sharded(name, entry.state, places) if is_tensor else None
        return root

    def _sharded(self, name: str, entry: dict[str, Any], places: dict[Any, Any]) -> Tensor:
        shape = _numbers(entry["size"])
        dtype = entry["properties"].state[0].removeprefix("torch.")
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: element type {dtype} is not known")
        boxes = [
            (_numbers(c.state["offsets"]), _numbers(c.state["sizes"])) for c in entry["chunks"]
        ]
        boxes = [box for box in boxes if math.prod(box[1])]  # a rank may have had nothing

        @functools.cache
        def load_shards() -> list[Shard]:
            with parsing(f"a shard of {name}"):
                if not _tile(shape, boxes):
                    raise CheckpointError(
                        f"damaged: the shards of {name} do not make up the tensor"
                    )
                return [load(position, sizes) for position, sizes in boxes]

        def load(position: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
            place = places[(name, *position)]
            path = self.path / place["relative_path"]
            if path.name != place["relative_path"] or place.get("transform_descriptors"):
                raise CheckpointError(f"{name}: its shard in {path} is compressed or elsewhere")
            if not path.is_file():
                raise CheckpointError(f"{path.name} is missing; copy the whole folder")
            whole = self._open(path)
            start, length = place["offset"], place["length"]
            if not 0 <= start <= start + length <= whole.size:
                raise CheckpointError(f"truncated: {path.name} ends before the shard of {name}")
            shard = read_zip(Window(whole.fd, start, length))
            if not isinstance(shard, Tensor) or (shard.shape, shard.dtype) != (sizes, dtype):
                raise CheckpointError(f"damaged: a shard of {name} is not what .metadata says")
            return position, shard

        return Tensor(dtype, shape, row_major(shape), load_shards=load_shards)


def _part(part: Any) -> str:
    if not isinstance(part, str | int):
        raise TypeError("not a name")
    return str(part)


def _numbers(values: Any) -> tuple[int, ...]:
    """Return a place or a size: without a limit, hashing nested tuples could take for ever."""
    if len(values) > _MAX_DEPTH or not all(type(value) is int for value in values):
        raise TypeError("not a place or a size")
    return tuple(values)


def _tile(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether (position, sizes) boxes cover the shape, all of it and nothing twice."""
    import numpy as np

    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        return False
    lows = np.array([position for position, _ in boxes]).reshape(len(boxes), len(shape))
    highs = lows + np.array([sizes for _, sizes in boxes]).reshape(lows.shape)
    is_inside = bool((lows >= 0).all() and (highs <= np.array(shape)).all())
    return is_inside and not any(
        ((lows[i] < highs[:i]) & (lows[:i] < highs[i])).all(axis=1).any() for i in range(len(boxes))
    )
