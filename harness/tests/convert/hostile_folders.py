"""Folders of torch.distributed.checkpoint that ask for more time or memory than they have bytes."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from .hostile_pickles import Random
from .opcodes import tensor, zipped


class Reduced:
    """Pickled as a call of a class of torch, and a state."""

    def __init__(self, **state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        return Reduced, (), self.state


def distributed(folder: Path, entries: object, places: object, paths: object = None) -> Path:
    path = folder / "a"
    path.mkdir(exist_ok=True)
    metadata = Reduced(storage_data=places, planner_data=paths, state_dict_metadata=entries)
    data = pickle.dumps(metadata, 2).replace(b"Reduced", b"TensorStorageMetadata")
    (path / ".metadata").write_bytes(data)
    return path


class Pairs(list):
    """Pickled as an OrderedDict of these pairs, whose keys need no hash."""

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, (list(self),)


def entry(size: tuple[int, ...], chunks: list[Reduced]) -> Reduced:
    return Reduced(size=size, properties=Properties(), chunks=chunks)


class Properties(Reduced):
    def __reduce__(self) -> tuple[object, ...]:
        return Reduced, (), ("float32",)


def chunk(offset: int, size: int) -> Reduced:
    return Reduced(offsets=(offset,), sizes=(size,))


def shared_chunks(folder: Path, n: int, rng: Random) -> Path:
    """Many tensors of one list of shards."""
    chunks = [chunk(i, 1) for i in range(n // 120 + 1)]
    shared = entry((len(chunks),), chunks)
    return distributed(folder, {f"{i:x}": shared for i in range(n // 24)}, Pairs())


def same_shard(folder: Path, n: int, rng: Random) -> Path:
    """Many shards that are one region of a file."""
    (folder / "a").mkdir(exist_ok=True)
    content = zipped(folder / "shard", b"\x80\x02" + tensor() + b".").read_bytes()
    (folder / "a" / "__0_0.distcp").write_bytes(content * 3)
    place = Reduced(relative_path="__0_0.distcp", offset=0, length=len(content))
    num = n // 150 + 1
    chunks = [chunk(4 * i, 4) for i in range(num)]
    places = Pairs((Reduced(fqn="a", offset=(4 * i,)), place) for i in range(num))
    return distributed(folder, {"a": entry((4 * num,), chunks)}, places)


FOLDERS: dict[str, Callable[[Path, int, Random], Path]] = {
    "shared_chunks": shared_chunks,
    "same_shard": same_shard,
}
