"""A checksum of a data set's contents, by which a resumed run notices that they have changed.

It covers the arrays and files that a data set's attributes name, and its lists and tables; neither
places nor times count. Of large ones it reads evenly spread blocks.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

MOST_ITEMS = 1000  # of a list
MOST_BYTES, MOST_BYTES_OF_ITEM = 2**27, 2**17  # of an array or file
NUM_BLOCKS = 64  # of what is larger


def checksum(dataset: Any) -> int | None:
    """Compute a checksum of a data set's contents; ``None`` if it has none that can be read."""
    total = None
    try:
        for part in _parts(dataset, False, set()):
            total = zlib.crc32(part, total or 0)
    except Exception:  # of an author's kind of object: a warning is worth no training
        return None
    return total


def _parts(value: Any, is_item: bool, seen: set[int]) -> Iterator[Any]:
    """Yield the bytes of a value that count.

    ``is_item``: a list or table holds it. Then numbers and texts count as well, which as attributes
    of a data set may be settings of the machine.
    """
    most = MOST_BYTES_OF_ITEM if is_item else MOST_BYTES
    if isinstance(value, (Dataset, list, tuple, dict)):
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, Dataset):
        for held in vars(value).values():
            yield from _parts(held, False, seen)
    elif isinstance(value, (list, tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        yield str(len(items)).encode()
        items = items[:: max(1, len(items) // MOST_ITEMS)] + items[-1:]
        for item in items:
            yield from _parts(item, True, seen)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield from _blocks(value.detach().cpu().reshape(-1).view(torch.uint8).numpy(), most)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        # Flattening any other array copies it, perhaps from a file that memory does not hold.
        if value.flags.c_contiguous and not value.dtype.hasobject:
            yield from _blocks(value.reshape(-1).view(np.uint8), most)
    elif isinstance(value, (str, Path)) and os.path.isfile(value):
        yield f"{Path(value).name if is_item else ''} {os.path.getsize(value)}".encode()
        if os.path.getsize(value):
            yield from _blocks(np.memmap(value, np.uint8, "r"), most)
    elif is_item and isinstance(value, (str, Path)):  # a folder by its name, wherever it is
        text = Path(value).name if os.path.isdir(value) else str(value)
        yield text.encode(errors="surrogateescape")
    elif is_item and isinstance(value, (bool, int, float, np.generic)):
        yield repr(value).encode()


def _blocks(values: np.ndarray[Any, Any], most: int) -> Iterator[Any]:
    """Yield all bytes, or as many as may be read, in blocks that are spread over them."""
    if len(values) <= most:
        yield values
        return
    size = max(most // NUM_BLOCKS, 1)
    for i in range(NUM_BLOCKS):
        start = (len(values) - size) * i // (NUM_BLOCKS - 1)
        yield values[start : start + size]
