"""Files and folders that one process makes once, while the others wait.

A file of the cache has its name only when it is complete. The lock is released by the system when
the process that holds it ends.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError
from harness.files import PART, sync


def cached(path: Path, create: Callable[[Path], object]) -> Path:
    """Return a file or folder of the cache, made by one process and once.

    Args:
        path: its name when it is complete.
        create: makes it at the path that it is given.

    Raises:
        UserError: if the cache cannot be written, such as on a full disk.
    """
    if path.exists():  # also in a cache that is read-only
        return path
    part = path.with_name(path.name + PART)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            with suppress(OSError):  # some network file systems have no such locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _remove(part)  # of a process that was killed
                try:
                    create(part)
                    os.replace(part, path)
                    sync(path.parent)
                finally:
                    _remove(part)
    except OSError as error:
        raise UserError(
            f"data.cache_dir={path.parent} cannot be written: {error.strerror or error}.\n"
            "Name another folder: data.cache_dir=<folder>."
        ) from error
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
