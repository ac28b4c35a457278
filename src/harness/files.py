"""Write files so that a name stands for whole contents, whenever the process or the power fails.

Imports nothing but the standard library: every part of the harness may use it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PART = ".part"  # ends the name of a file that is still being written


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file beside `path` that takes its name, durably, if the whole block succeeds.

    The file is synced before it is renamed and its folder afterwards, so that `path` has the old
    contents or the new ones. If the block raises, nothing is left.

    Raises:
        OSError: the disk is full, or the system refuses to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART}")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # also the exception that a signal's handler raises
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync(path.parent)


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
