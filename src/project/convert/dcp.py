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


def read_dcp(folder: Path, open_file: Callable[[Path], Window]) -> Any:
    """Return the saved state, nested as it was, with a Tensor for each tensor in it.

    Raises:
        CheckpointError: `.metadata` is damaged. Shards are read, and checked, when asked for.
    """
    metadata = unpickle(io.BufferedReader(open_file(folder / ".metadata")), no_storage)
    root: OrderedDict[str, Any] = OrderedDict()
    with parsing(".metadata"):
        places = {
            (index.state["fqn"], *(index.state.get("offset") or ())): info.state
            for index, info in metadata.state["storage_data"].items()
        }
        paths = metadata.state["planner_data"] or {}
        for name, entry in metadata.state["state_dict_metadata"].items():
            *parents, leaf = (_part(part) for part in paths.get(name, (name,)))
            target = root
            for parent in parents:
                target = target.setdefault(parent, OrderedDict())
            target[leaf] = None
            if entry.name.endswith("TensorStorageMetadata"):
                target[leaf] = _tensor(name, entry.state, places, folder, open_file)
    return root


def _part(part: Any) -> str:
    if not isinstance(part, str | int):
        raise TypeError(part)
    return str(part)


def _tensor(
    name: str,
    entry: dict[str, Any],
    places: dict[tuple[Any, ...], dict[str, Any]],
    folder: Path,
    open_file: Callable[[Path], Window],
) -> Tensor:
    shape = tuple(entry["size"])
    dtype = entry["properties"].state[0].removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{name}: element type {dtype} is not known")
    chunks = [(tuple(c.state["offsets"]), tuple(c.state["sizes"])) for c in entry["chunks"]]
    if sum(math.prod(sizes) for _, sizes in chunks) != math.prod(shape):
        raise CheckpointError(f"damaged: the shards of {name} do not add up to the tensor")

    @functools.cache
    def load_shards() -> list[Shard]:
        with parsing(f"a shard of {name}"):
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
        fits = all(p + n <= size for p, n, size in zip(position, sizes, shape, strict=True))
        if (
            not isinstance(shard, Tensor)
            or (shard.shape, shard.dtype) != (sizes, dtype)
            or not fits
        ):
            raise CheckpointError(f"damaged: a shard of {name} is not what .metadata says")
        return position, shard

    return Tensor(dtype, shape, row_major(shape), load_shards=load_shards)
