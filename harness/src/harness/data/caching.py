"""Files and folders that are made once, whichever process comes first, and whole or not at all.

A file of the cache has its name only when it is complete. A lock, which the system releases when
its process ends, lets one process make it while the others wait.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError
from harness.files import FULL, PART, sync


def cached(path: Path, create: Callable[[Path], object]) -> Path:
    """Return a file or folder of the cache, made by one process and once.

    Args:
        path: what it is called when it is complete.
        create: makes it at the path that it is given.

    Raises:
        UserError: if the cache cannot be written, or has no room.
    """
    if path.exists():  # also in a cache that is only read
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
        about = "has no room" if error.errno in FULL else f"cannot be written: {error.strerror}"
        if error.errno == errno.EEXIST:
            about = "is a file"
        raise UserError(
            f"data.cache_dir={path.parent} {about}.\nName another folder: data.cache_dir=<folder>."
        ) from error
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
