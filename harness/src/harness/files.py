"""Write files that are never left half-written, even if the process is killed or the power fails.

- ``atomic_write`` and ``write_durably`` write any file.
- ``write_yaml`` adds a checksum. If a run's file was damaged or edited, ``read_yaml`` raises.
- ``read_bytes`` and ``refuse_links`` guard against the folder of a stranger's run: they follow no
  link that leads out of it.
"""

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import UserError

LIBRARY = Path(__file__).resolve().parent  # the folder of this package
REPRODUCED = "reproduced"  # ``runs.py reproduce`` works in this subfolder of a run's folder
MAX_YAML, MAX_JSON = 2**18, 2**23  # the largest files that are read, in bytes
PARTIAL = ".part"  # suffix of a file that is being written
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk
FROZEN = "# Frozen with the run. crc32 of the lines below: {:08x}\n"


@contextmanager
def atomic_write(path: Path, is_forced: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file, which replaces ``path`` when the block ends without an exception.

    The file is synced before it is renamed, and its folder afterwards. If the block raises, the
    temporary file is removed.

    Args:
        path: the name of the complete file.
        is_forced: whether to replace an existing file; otherwise, raise a FileExistsError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not is_forced and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.replace(partial, path)
    except BaseException as error:  # including one that a signal handler raises
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # the errors of write and fsync have no file name
        raise
    fsync(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Replace the contents of a file; the old ones stay until the new ones are on the disk."""
    with atomic_write(path) as file:
        file.write(data)


def fsync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partial_files(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder."""
    for partial in folder.glob(f".*{PARTIAL}"):
        partial.unlink(missing_ok=True)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a regular file of at most ``max_bytes`` bytes.

    Raises:
        OSError, ValueError: if the path is a link, a device or a pipe, or the file is larger.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path.name} has more than {max_bytes:,} bytes")
    return data


def refuse_links(run_dir: Path) -> None:
    """Refuse a run's folder that has a link to a place outside, a pipe or a device.

    A command writes, truncates and removes files in the folder, and would follow such a link. Links
    within the folder are allowed: ``best.ckpt`` is one. Clones of ``runs.py reproduce`` are not
    searched.

    Raises:
        UserError: with the name of the file.
    """
    for folder, folders, files in os.walk(run_dir):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            if kind == stat.S_IFLNK and is_inside(path, run_dir):
                continue
            if kind not in (stat.S_IFDIR, stat.S_IFREG):
                raise UserError(
                    f"{path} is a link to a place outside of its run's folder, or is not a "
                    "regular file.\nReplace the link by the file or the folder itself, or use "
                    "another run."
                )
        folders[:] = [name for name in folders if name != REPRODUCED]


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Return whether a path, after resolving links, is in a folder or is the folder itself."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def write_yaml(path: Path, text: str) -> None:
    """Write YAML below a comment with its checksum."""
    data = text.encode()
    write_durably(path, FROZEN.format(zlib.crc32(data)).encode() + data)


def read_yaml(path: Path, max_bytes: int = MAX_YAML) -> str:
    """Return the text of a file that ``write_yaml`` wrote.

    Raises:
        UserError: if the file was changed afterwards.
        OSError, ValueError: if the file cannot be read, or is no text.
    """
    data = read_bytes(path, max_bytes)
    first_line, _, text = data.partition(b"\n")
    if first_line + b"\n" != FROZEN.format(zlib.crc32(text)).encode():
        raise UserError(
            f"{path} was damaged or edited: its checksum is wrong.\nRestore it from a backup. To "
            "change a setting, add an override to the command. With resume=null,\nthe command "
            "starts a new run, in which all settings can change."
        )
    return data.decode()


def best_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint that a run tested: the best one, or else the last one.

    Raises:
        UserError: if the folder of its checkpoints has a link to a place outside.
    """
    refuse_links(run_dir / "checkpoints")
    names = ["best.ckpt", "last.ckpt"]
    with suppress(OSError, ValueError):  # no results, or damaged ones
        if b"tested_last_weights" in read_bytes(run_dir / "results.json", MAX_JSON):
            names.reverse()
    paths = [run_dir / "checkpoints" / name for name in names]
    return next((path for path in paths if path.is_file()), None)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON; NaN and infinities become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=indent, allow_nan=False)
