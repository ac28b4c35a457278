"""A checksum of what a data set holds, to tell whether it holds other data than before.

It counts the contents of the arrays and files that a data set's attributes name, and of its lists
and tables, wherever they are, and not their times. Of what is large it reads evenly spread blocks.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

MOST_BYTES = {"array": 2**29, "file": 2**26}  # read of all of a data set's arrays, and files
NUM_BLOCKS = 64  # of what is larger
MOST_ITEMS = 1000  # of a list
MOST_DEPTH = 6


def checksum(dataset: Any) -> int | None:
    """Compute a checksum of what a data set holds; ``None`` where nothing of it can be seen."""
    total = None
    try:
        for part in _parts(dataset, 0, False, {}, dict(MOST_BYTES)):
            total = zlib.crc32(part, total or 0)
    except Exception:  # of an author's kind of object: a warning is worth no training
        return None
    return total


def _parts(
    value: Any, depth: int, is_item: bool, seen: dict[int, Any], left: dict[str, int]
) -> Iterator[Any]:
    """Yield the bytes of a value that count.

    Args:
        value: of any kind.
        depth: how many objects hold it.
        is_item: whether a list or table holds it: then numbers and texts count as well, which
            as attributes of a data set may be settings of the machine.
        seen: what was looked at, by id; it keeps a reference, as ids of freed objects are reused.
        left: bytes that may still be read of each kind.
    """
    if depth > MOST_DEPTH or id(value) in seen:
        return
    if isinstance(value, (str, Path)):
        yield from _of_path(value, is_item, left)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        if isinstance(value, torch.Tensor):
            value = value.view(torch.int16) if value.dtype is torch.bfloat16 else value
            value = value.detach().cpu().numpy()  # NumPy has no bfloat16
        array: np.ndarray[Any, Any] = value
        if not array.dtype.hasobject:
            yield f"{array.dtype} {array.shape}".encode()
            # reshape would copy a large array that is not contiguous.
            small = array.nbytes <= left["array"] // 2
            if array.nbytes and (array.flags.c_contiguous or small):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                yield from (flat[a:b] for a, b in _blocks(len(flat), "array", left))
    elif isinstance(value, (list, tuple, dict, Dataset)):
        seen[id(value)] = value
        is_table = not isinstance(value, Dataset)
        held: Any = value if is_table else vars(value)
        items = list(held.values() if isinstance(held, dict) else held)
        if is_table:
            yield str(len(items)).encode()
            items = items[:: max(1, len(items) // MOST_ITEMS)] + items[-1:]
        for item in items:
            yield from _parts(item, depth + 1, is_table, seen, left)
    elif is_item and isinstance(value, (bool, int, float, np.generic)):
        yield repr(value).encode()


def _of_path(name: str | Path, is_item: bool, left: dict[str, int]) -> Iterator[bytes]:
    """Yield what of a file counts, with its name where a list holds it; or a text in a list."""
    path = Path(name)
    if os.path.isfile(path):  # which says no to what can be no path
        size = path.stat().st_size
        yield f"{path.name if is_item else ''} {size}".encode()
        with path.open("rb") as file:
            for start, end in _blocks(size, "file", left):
                file.seek(start)
                yield file.read(end - start)
    elif is_item and isinstance(name, str):
        yield (path.name if os.path.isdir(path) else name).encode(errors="surrogateescape")


def _blocks(length: int, kind: str, left: dict[str, int]) -> list[tuple[int, int]]:
    """Choose all of a length, or as much as may be read, in blocks that are spread over it."""
    most = left[kind] // 4  # so that later ones count as well
    left[kind] -= min(length, most)
    if length <= most:
        return [(0, length)] if length else []
    size = max(most // NUM_BLOCKS, 1)
    starts = [(length - size) * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]
    return [(start, start + size) for start in starts]
