"""Files and folders that one process creates once, while the others wait.

A file in the cache gets its name only when it is complete. The creating process holds a lock; if
the process dies, the operating system releases the lock.
"""

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.errors import UserError
from harness.files import PARTIAL, fsync


def cached(path: Path, create: Callable[[Path], object]) -> Path:
    """Return ``path``, a file or folder in the cache; create it if it does not exist.

    Args:
        path: the name of the complete file or folder.
        create: a function that gets a path, and creates the file or folder there.

    Raises:
        UserError: if the cache cannot be written, for example on a full disk.
    """
    if path.exists():  # a read-only cache works as well
        return path
    partial = path.with_name(path.name + PARTIAL)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _remove(partial)  # a killed process may have left it
                try:
                    create(partial)
                    os.replace(partial, path)
                    fsync(path.parent)
                finally:
                    _remove(partial)
    except OSError as error:
        # ``create`` may have failed to read a file of the user's.
        if error.filename and not Path(error.filename).is_relative_to(path.parent):
            raise
        raise UserError(
            f"data.cache_dir={path.parent} cannot be written: {error.strerror or error}.\n"
            "Set another folder: data.cache_dir=<folder>."
        ) from error
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
