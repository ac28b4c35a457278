"""Write files so that a name always has whole contents, also when the process or the power fails.

``replacing`` and ``write_durably`` are for any file. ``write_yaml`` adds a checksum, so that a
damaged or edited file of a run is refused and does not become a setting. A run's folder may be a
stranger's: ``read_bytes`` and ``refuse_links`` follow nothing that leads out of it.
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
REPRODUCED = "reproduced"  # the folder, in a run's own, of what ``runs.py reproduce`` makes
MAX_YAML, MAX_JSON = 2**18, 2**23  # bytes of a file of a run
PART = ".part"  # ends the name of a file that is being written
FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk
FROZEN = "# Frozen with the run. crc32 of the lines below: {:08x}\n"


@contextmanager
def replacing(path: Path, is_forced: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that durably takes the name ``path`` if the whole block succeeds.

    The file is synced before it is renamed and its folder afterwards. If the block raises, nothing
    is left. Without ``is_forced`` an existing ``path`` raises a FileExistsError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART}")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if not is_forced and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.replace(part, path)
    except BaseException as error:  # also the exception that a signal's handler raises
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # errors of a write and a sync have no name
        raise
    sync(path.parent)


def write_durably(path: Path, data: bytes) -> None:
    """Give a file new contents; it has the old ones until the new ones are on the disk."""
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
    """Remove the unfinished files of processes that were killed."""
    for part in folder.glob(f".*{PART}"):
        part.unlink(missing_ok=True)


def read_bytes(path: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes: no link, no device, and no pipe that waits.

    Raises:
        OSError, ValueError: if it is another kind of file, or larger.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path.name} has more than {most:,} bytes")
    return data


def refuse_links(run_dir: Path) -> None:
    """Refuse a run's folder with a link that leads out of it, or with a pipe or a device.

    A command writes, truncates and removes files of these names, and would do so elsewhere. Links
    inside the folder are fine: ``best.ckpt`` is one. Clones of ``runs.py reproduce`` are not read.

    Raises:
        UserError: with the name.
    """
    for folder, folders, files in os.walk(run_dir):
        for path in (os.path.join(folder, name) for name in (*folders, *files)):
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            if kind == stat.S_IFLNK and is_inside(path, run_dir):
                continue
            if kind not in (stat.S_IFDIR, stat.S_IFREG):
                raise UserError(
                    f"{path} leads out of its run's folder, or is no regular file.\n"
                    "Put the file or the folder itself in its place, or use another run."
                )
        folders[:] = [name for name in folders if name != REPRODUCED]


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Return whether a path, with its links followed, is in a folder, or the folder itself."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def write_yaml(path: Path, text: str) -> None:
    """Write YAML below a comment with its checksum."""
    data = text.encode()
    write_durably(path, FROZEN.format(zlib.crc32(data)).encode() + data)


def read_yaml(path: Path, most: int = MAX_YAML) -> str:
    """Read what ``write_yaml`` has written.

    Raises:
        UserError: if it was changed since.
        OSError, ValueError: if it cannot be read, or is no text.
    """
    data = read_bytes(path, most)
    first, _, below = data.partition(b"\n")
    if first + b"\n" != FROZEN.format(zlib.crc32(below)).encode():
        raise UserError(
            f"{path} is not what was frozen with the run: it was damaged, or edited.\n"
            "Bring it back from a copy. Another setting belongs in the command; what may not "
            "change there,\nsuch as a learning rate, belongs to another run: use resume=null."
        )
    return data.decode()


def best_checkpoint(run_dir: Path) -> Path | None:
    """Find the checkpoint that a run has tested, or the last one of a run that kept no best.

    Raises:
        UserError: if the folder of its checkpoints has a link that leads out of it.
    """
    refuse_links(run_dir / "checkpoints")
    names = ["best.ckpt", "last.ckpt"]
    with suppress(OSError, ValueError):  # there are no results, or they are damaged
        if b"tested_last_weights" in read_bytes(run_dir / "results.json", MAX_JSON):
            names.reverse()
    paths = [run_dir / "checkpoints" / name for name in names]
    return next((path for path in paths if path.is_file()), None)


def json_text(value: Any, indent: int | None = None) -> str:
    """Write plain values as JSON, which has null for what is no finite number."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=indent, allow_nan=False)
