"""Files and folders that are made once, whichever process comes first, and whole or not at all.

What is kept has its name only when it is complete. A lock, which the system releases when its
process ends, lets one process make it while the others wait.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import FULL, PART, sync


def identity(path: str | Path) -> list[Any]:
    """What tells a file from an older one of the same name, without reading it.

    Also from one that was copied over it with its time, which the time of the change tells.
    """
    status = os.stat(path)
    return [os.path.realpath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def hashed(identity: list[Any]) -> str:
    """A name for what counts."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def kept(path: Path, write: Callable[[Path], object]) -> Path:
    """A file or folder of the cache, made by one process and once.

    Args:
        path: what it is called when it is complete.
        write: makes it at the path that it is given.

    Raises:
        UserError: if the cache cannot be written, or has no room.
    """
    if path.exists():  # also in a cache that is only read
        return path
    part = path.with_name(path.name + PART)
    try:
        with locked(path):
            if not path.exists():
                remove(part)  # of a process that was killed
                try:
                    write(part)
                    os.replace(part, path)
                    sync(path.parent)
                finally:
                    remove(part)
    except OSError as error:
        about = "has no room" if error.errno in FULL else f"cannot be written: {error.strerror}"
        if error.errno == errno.EEXIST:
            about = "is a file"
        raise UserError(
            f"data.cache_dir={path.parent} {about}.\nName another folder: data.cache_dir=<folder>."
        ) from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock of a path, then hold it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
