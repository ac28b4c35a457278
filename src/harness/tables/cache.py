"""Arrays that are made once and mapped into memory ever after, by all processes that need them."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError
from harness.files import FULL, remove_parts, replacing

Arrays = dict[str, NDArray[Any]]
LOCK = ".lock"


def identity(path: str | Path) -> list[Any]:
    """What tells a file from an older one of the same name, without reading it."""
    found = os.stat(path)
    return [os.path.abspath(path), found.st_size, found.st_mtime_ns]


def cached(folder: Path, key: Any, names: list[str], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a key, mapped; the first process to ask makes them while others wait.

    Each file takes its name when it is whole, so that a killed process leaves nothing that looks
    complete.

    Args:
        folder: where they are kept.
        key: all that they depend on, as JSON has it.
        names: of the arrays.
        make: computes them.

    Raises:
        UserError: if they cannot be written.
    """
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).hexdigest()
    paths = {name: folder / f"{digest}.{name}.npy" for name in names}
    if (found := _mapped(paths)) is not None:
        return found
    try:
        with _locked(folder):
            if (found := _mapped(paths)) is not None:
                return found  # of the process that was here before
            remove_parts(folder)
            _write(folder, paths, make())
    except OSError as error:
        hint = "Free space, or choose" if error.errno in FULL else "Choose"
        raise UserError(
            f"data.cache_dir: {folder} cannot be written: {error.strerror}.\n"
            f"{hint} another folder with data.cache_dir=<folder>, or use "
            "data.cache_megabytes=null: then each start reads the file again."
        ) from error
    found = _mapped(paths)
    assert found is not None, f"{folder}: what was just written cannot be read"
    return found


def _mapped(paths: Mapping[str, Path]) -> Arrays | None:
    """The arrays, or ``None`` where one is not there, or was cut off by a failing disk."""
    try:
        return {name: np.load(path, mmap_mode="r") for name, path in paths.items()}
    except (OSError, ValueError, EOFError):
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process writes here; the kernel frees what a killed one has held."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(folder: Path, paths: Mapping[str, Path], arrays: Arrays) -> None:
    num_bytes = sum(array.nbytes for array in arrays.values())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise OSError(FULL[0], f"{num_bytes / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} free")
    for name, path in paths.items():
        # Not through a mapping: where the disk is full, that ends the process without a word.
        with replacing(path) as file:
            np.lib.format.write_array(file, arrays[name], allow_pickle=False)
