"""A GPU belongs to the run that has chosen it, until that run's first process ends.

The system drops a file's lock when the process ends, however it ends. The files are in /tmp,
whatever TMPDIR says: all users of a machine must find the same ones. They are opened for reading
only, so that a file that one user has made serves the others.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.errors import UserError

FOLDER = Path("/tmp")
WAIT_SECONDS = 30.0
HELD: dict[str, int] = {}  # file descriptors, by the name of what is locked


def take(name: str) -> bool:
    """Lock a GPU for as long as this process runs; ``False`` if another process has it."""
    while True:
        descriptor = _open(_path(name))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        if _is_at(descriptor, _path(name)):
            HELD[name] = descriptor
            return True
        os.close(descriptor)  # somebody has cleaned the folder: this file is gone


def release(name: str) -> None:
    """Give a GPU back."""
    os.close(HELD.pop(name))


def holder(name: str) -> int | None:
    """The process that has locked a GPU; 0 if it is not to be seen, ``None`` if there is none."""
    try:
        status = _path(name).stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in locks:  # 1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF
        words = line.split()
        if words[1] == "FLOCK" and words[5] == place:
            return max(0, int(words[4]))
    return None


@contextmanager
def choosing() -> Iterator[None]:
    """Let one process at a time choose: each sees what the one before has taken.

    Raises:
        UserError: if another process does not come to an end with it.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not take("choice"):
        if time.monotonic() > deadline:
            raise UserError(
                f"Process {holder('choice')} has been choosing GPUs for {WAIT_SECONDS:.0f} seconds."
                "\nEnd it, or name the GPUs with CUDA_VISIBLE_DEVICES and leave out gpus=emptiest."
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        release("choice")


def _path(name: str) -> Path:
    return FOLDER / f"train_{name.replace('/', '_')}.lock"


def _open(path: Path) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            # Not with O_CREAT at once: systems refuse that for another user's file in /tmp.
            with suppress(FileNotFoundError):
                return os.open(path, flags)
            with suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(descriptor, 0o644)  # whatever the umask: other users read it
                return descriptor
        except OSError as error:
            raise UserError(
                f"{path}, which keeps a GPU for one run, cannot be opened: {error.strerror}.\n"
                "Remove it, or name the GPUs with CUDA_VISIBLE_DEVICES and leave out gpus=emptiest."
            ) from error


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _close_inherited() -> None:
    """A forked data worker must not hold its process's GPUs beyond that process's end."""
    for descriptor in HELD.values():
        os.close(descriptor)
    HELD.clear()


os.register_at_fork(after_in_child=_close_inherited)
