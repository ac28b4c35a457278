"""What tells whether a data set holds other data than before, without reading all of it.

Looked at are the arrays and the files that a data set names, and what its lists and tables hold:
their contents, wherever they are, and not their times.
"""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from harness.checkpoints.fingerprints import content_of

# Of each array and each file as much is read, and of all of a data set's.
MOST_BYTES_OF_ARRAY, MOST_BYTES_OF_ARRAYS = 2**28, 2**29
MOST_BYTES_OF_FILE, MOST_BYTES_OF_FILES = 2**24, 2**26
NUM_BLOCKS = 64  # of what is larger, the first and the last among them
MOST_ITEMS = 1000  # of a list
MOST_DEPTH = 6


def identity_of(dataset: Any) -> int | None:
    """A checksum of what a data set holds; ``None`` where nothing of it can be seen."""
    try:
        return Reader().sum_of(dataset)
    except Exception:  # of an author's kind of object: a warning is worth no training
        return None


class Reader:
    """Reads one data set."""

    def __init__(self) -> None:
        self.bytes_left, self.array_bytes_left = MOST_BYTES_OF_FILES, MOST_BYTES_OF_ARRAYS
        self.seen: dict[int, Any] = {}

    def sum_of(self, value: Any) -> int | None:
        """A checksum of all parts in their order; ``None`` without any."""
        total = None
        for part in self.parts(value, 0):
            total = zlib.crc32(part, total or 0)
        return total

    def parts(self, value: Any, depth: int, is_item: bool = False) -> Iterator[Any]:
        """The bytes that count of a value.

        Args:
            value: of any kind.
            depth: how many objects it is in.
            is_item: whether a list or table holds it: then numbers and texts count as well, which
                as settings of a data set may be those of the machine.
        """
        if depth > MOST_DEPTH or id(value) in self.seen:
            return
        if isinstance(value, (str, Path)):
            yield from self.file(value, is_item)
        elif isinstance(value, torch.Tensor):
            if value.layout is torch.strided and not value.is_quantized and not value.is_meta:
                yield from self.numbers(value, value.is_contiguous())
        elif isinstance(value, np.ndarray):
            if not value.dtype.hasobject:
                yield from self.numbers(value, value.flags.c_contiguous)
        elif isinstance(value, (list, tuple, dict, Dataset)):
            self.seen[id(value)] = value
            is_table = not isinstance(value, Dataset)
            held: Any = value if is_table else vars(value)
            kind = next(kind for kind in (dict, list, tuple) if isinstance(held, kind))
            # Not an author's own way to go over it, which may load what it does not hold.
            items = list(dict.values(held) if kind is dict else kind.__iter__(held))
            if is_table:
                yield str(len(items)).encode()
                items = [items[i] for i in spread(len(items), MOST_ITEMS)]
            for item in items:
                yield from self.parts(item, depth + 1, is_table)
        elif is_item and isinstance(value, (bool, int, float, np.generic)):
            yield repr(value).encode()

    def file(self, name: str | Path, is_item: bool) -> Iterator[bytes]:
        """What of a file counts, with its name where a list holds it; or a text in a list."""
        path = Path(name)
        if os.path.isfile(path):  # which says no to what can be no path
            size = path.stat().st_size
            yield f"{path.name if is_item else ''} {size}".encode()
            most = min(MOST_BYTES_OF_FILE, self.bytes_left)
            with path.open("rb") as file:
                for start, end in blocks(size, most) if most else []:
                    file.seek(start)
                    yield file.read(end - start)
            self.bytes_left -= min(size, most)
        elif is_item and isinstance(name, str):
            yield (path.name if os.path.isdir(path) else name).encode(errors="surrogateescape")

    def numbers(self, value: Any, is_flat: bool) -> Iterator[Any]:
        """The shape of an array or a tensor, and its bytes, or some of each part of them."""
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        # To flatten what is not contiguous copies it.
        if not value.nbytes or not (is_flat or value.nbytes <= MOST_BYTES_OF_ARRAY):
            return
        flat = content_of(value)
        most = min(MOST_BYTES_OF_ARRAY, self.array_bytes_left)
        self.array_bytes_left -= min(len(flat), most)
        for start, end in blocks(len(flat), most) if most else []:
            part = flat[start:end]
            yield part.cpu().numpy() if isinstance(part, torch.Tensor) else part


def blocks(length: int, most: int) -> list[tuple[int, int]]:
    """The beginnings and ends of all of a length, or of blocks that are spread over it."""
    if length <= most:
        return [(0, length)]
    size = most // NUM_BLOCKS
    starts = [(length - size) * i // (NUM_BLOCKS - 1) for i in range(NUM_BLOCKS)]
    return [(start, start + size) for start in starts]


def spread(length: int, most: int) -> list[int]:
    """All positions, or some that are spread over them, the first and the last among them."""
    if length <= most:
        return list(range(length))
    return [(length - 1) * i // (most - 1) for i in range(most)]
