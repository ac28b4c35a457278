"""Arrays that are made once and mapped into memory ever after, by all processes that need them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.caching import hashed, kept, remove
from harness.files import FULL, replacing

Arrays = dict[str, NDArray[Any]]


def cached(folder: Path, key: Any, names: list[str], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a key, mapped; the first process to ask makes them while others wait.

    Args:
        folder: where they are kept.
        key: all that they depend on, as JSON has it.
        names: of the arrays.
        make: computes them.

    Raises:
        UserError: if they cannot be written.
    """
    home = folder / f"table_{hashed(key)}"

    def write(part: Path) -> None:
        part.mkdir()
        _write(part, make())

    found = _mapped(kept(home, write), names)
    if found is None:  # cut off by a failing disk
        remove(home)
        found = _mapped(kept(home, write), names)
    assert found is not None, f"{home}: what was just written cannot be read"
    return found


def _mapped(home: Path, names: list[str]) -> Arrays | None:
    """The arrays, or ``None`` where one is damaged."""
    try:
        return {name: np.load(home / f"{name}.npy", mmap_mode="r") for name in names}
    except (OSError, ValueError, EOFError):
        return None


def _write(home: Path, arrays: Arrays) -> None:
    num_bytes = sum(array.nbytes for array in arrays.values())
    if num_bytes > shutil.disk_usage(home).free:
        raise OSError(FULL[0], os.strerror(FULL[0]))
    for name, array in arrays.items():
        # Not through a mapping: where the disk is full, that ends the process without a word.
        with replacing(home / f"{name}.npy") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)
