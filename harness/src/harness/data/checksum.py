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

MOST_BYTES = 2**27  # of an attribute; the items of a list share them
NUM_BLOCKS = 64  # of what is larger
MOST_ITEMS = 1000  # of a list


def checksum(dataset: Any) -> int | None:
    """Compute a checksum of what a data set holds; ``None`` where nothing of it can be seen."""
    total = None
    try:
        for part in _parts(dataset, MOST_BYTES, False, {}):
            total = zlib.crc32(part, total or 0)
    except Exception:  # of an author's kind of object: a warning is worth no training
        return None
    return total


def _parts(value: Any, most: int, is_item: bool, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the bytes of a value that count.

    Args:
        value: of any kind.
        most: bytes of it that may be read.
        is_item: whether a list or table holds it: then numbers and texts count as well, which
            as attributes of a data set may be settings of the machine.
        seen: what was looked at, by id; it keeps a reference, as ids of freed objects are reused.
    """
    if most == 0 or id(value) in seen:
        return
    if isinstance(value, (str, Path)):
        yield from _of_path(value, most, is_item)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield from _of_array(value, most)
    elif isinstance(value, Dataset):
        seen[id(value)] = value
        for held in vars(value).values():
            yield from _parts(held, most, False, seen)
    elif isinstance(value, (list, tuple, dict)):
        seen[id(value)] = value
        items = list(value.values() if isinstance(value, dict) else value)
        yield str(len(items)).encode()
        items = items[:: max(1, len(items) // MOST_ITEMS)] + items[-1:]
        for item in items:
            yield from _parts(item, most // len(items), True, seen)
    elif is_item and isinstance(value, (bool, int, float, np.generic)):
        yield repr(value).encode()


def _of_array(value: torch.Tensor | np.ndarray[Any, Any], most: int) -> Iterator[Any]:
    yield f"{value.dtype} {tuple(value.shape)}".encode()
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    elif value.dtype.hasobject or not (value.flags.c_contiguous or value.nbytes <= most):
        return  # to be flat, it would be copied, perhaps from a file that memory does not hold
    else:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    yield from (flat[start:end] for start, end in _blocks(len(flat), most))


def _of_path(name: str | Path, most: int, is_item: bool) -> Iterator[bytes]:
    """Yield what of a file counts, with its name where a list holds it; or a text in a list."""
    path = Path(name)
    if os.path.isfile(path):  # which says no to what can be no path
        size = path.stat().st_size
        yield f"{path.name if is_item else ''} {size}".encode()
        with path.open("rb") as file:
            for start, end in _blocks(size, most):
                file.seek(start)
                yield file.read(end - start)
    elif is_item:
        yield (path.name if os.path.isdir(path) else str(name)).encode(errors="surrogateescape")


def _blocks(length: int, most: int) -> list[tuple[int, int]]:
    """Choose all of a length, or as much as may be read, in blocks that are spread over it."""
    if length <= most:
        return [(0, length)]
    size = max(most // NUM_BLOCKS, 1)
    starts = [(length - size) * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]
    return [(start, start + size) for start in starts]
