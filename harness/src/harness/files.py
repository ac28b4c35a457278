"""Write files so that a name stands for whole contents, whenever the process or the power fails.

Imports nothing but the standard library: every part of the harness may use it.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part"  # ends the name of a file that is still being written
FULL = (errno.ENOSPC, errno.EDQUOT)  # what the system says where there is no room


@contextmanager
def replacing(path: Path, is_forced: bool = True) -> Iterator[BinaryIO]:
    """Open a new file beside `path` that takes its name, durably, if the whole block succeeds.

    The file is synced before it is renamed and its folder afterwards, so that `path` has the old
    contents or the new ones. If the block raises, nothing is left. Without `is_forced` a path that
    exists at the end of the block raises a FileExistsError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART}")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if is_forced:
            os.replace(part, path)
        else:
            _rename_if_new(part, path)
    except BaseException as error:  # also the exception that a signal's handler raises
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # which a write and a sync do not tell
        raise
    sync(path.parent)


def _rename_if_new(part: Path, path: Path) -> None:
    """Rename a file, or raise a FileExistsError; os.replace would replace what has the name."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(part, path)
    else:
        part.unlink()


def write_durably(path: Path, data: bytes) -> None:
    """Give a file new contents; it keeps the old ones until these are on the disk."""
    with replacing(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(folder: Path) -> None:
    """Remove what was being written when an earlier process ended."""
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)
