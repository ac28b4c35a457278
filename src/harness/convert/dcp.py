"""Read a torch.distributed.checkpoint folder: what FSDP and Lightning's sharded strategies write.

`.metadata` is a pickle that torch's own tools execute; here it is data. It lists each tensor's
shards, and each shard is a torch.save archive inside one of the `.distcp` files.
"""

import functools
import io
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .formats import Window, read_zip
from .tensors import DTYPES, CheckpointError, Tensor, parsing, row_major
from .unpickle import no_storage, unpickle

Shard = tuple[tuple[int, ...], Tensor]
_MAX_DEPTH = 100  # of names and of shapes


def read_dcp(folder: Path, open_file: Callable[[Path], Window]) -> Any:
    """Return the saved state, nested as it was, with a Tensor for each tensor in it.

    Raises:
        CheckpointError: `.metadata` is damaged. Shards are read, and checked, when asked for.
    """
    metadata = unpickle(io.BufferedReader(open_file(folder / ".metadata")), no_storage)
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
            target[leaf] = None
            if entry.name.endswith("TensorStorageMetadata"):
                target[leaf] = _tensor(name, entry.state, places, folder, open_file)
    return root


def _part(part: Any) -> str:
    if not isinstance(part, str | int):
        raise TypeError("not a name")
    return str(part)


def _numbers(values: Any) -> tuple[int, ...]:
    """Return a place or a size: without a limit, hashing nested tuples could take for ever."""
    if len(values) > _MAX_DEPTH or not all(type(value) is int for value in values):
        raise TypeError("not a place or a size")
    return tuple(values)


def _tensor(
    name: str,
    entry: dict[str, Any],
    places: dict[tuple[Any, ...], dict[str, Any]],
    folder: Path,
    open_file: Callable[[Path], Window],
) -> Tensor:
    shape = _numbers(entry["size"])
    dtype = entry["properties"].state[0].removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{name}: element type {dtype} is not known")
    chunks = [(_numbers(c.state["offsets"]), _numbers(c.state["sizes"])) for c in entry["chunks"]]
    chunks = [chunk for chunk in chunks if math.prod(chunk[1])]  # a rank may have had nothing

    @functools.cache
    def load_shards() -> list[Shard]:
        with parsing(f"a shard of {name}"):
            if not _tile(shape, chunks):
                raise CheckpointError(f"damaged: the shards of {name} do not make up the tensor")
            return [load(position, sizes) for position, sizes in chunks]

    def load(position: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
        place = places[(name, *position)]
        file_name = place["relative_path"]
        if Path(file_name).name != file_name or place.get("transform_descriptors"):
            raise CheckpointError(f"{name}: its shard in {file_name} is compressed or elsewhere")
        if not (folder / file_name).is_file():
            raise CheckpointError(f"{file_name} is missing; copy the whole folder")
        whole = open_file(folder / file_name)
        start, length = place["offset"], place["length"]
        if not 0 <= start <= start + length <= whole.size:
            raise CheckpointError(f"truncated: {file_name} ends before the shard of {name}")
        shard = read_zip(Window(whole.fd, start, length))
        if not isinstance(shard, Tensor) or (shard.shape, shard.dtype) != (sizes, dtype):
            raise CheckpointError(f"damaged: a shard of {name} is not what .metadata says")
        return position, shard

    return Tensor(dtype, shape, row_major(shape), load_shards=load_shards)


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
