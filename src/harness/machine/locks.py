"""Locks that keep a GPU for the run that has chosen it, until the run's first process ends.

The system releases a file's lock when the process ends, however it ends. The files are in /tmp
whatever TMPDIR says, because all users of a machine must find the same ones. They are opened for
reading only, so that a file of one user serves the others.
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


def acquire(name: str) -> bool:
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
        os.close(descriptor)  # another program has removed the file meanwhile


def release(name: str) -> None:
    """Give a GPU back."""
    os.close(HELD.pop(name))


def holder(name: str) -> int | None:
    """The id of the process that has locked a GPU: 0 if it is invisible, ``None`` if none has."""
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
    """Let one process at a time choose: each sees what the one before has locked.

    Raises:
        UserError: if another process holds the lock for more than ``WAIT_SECONDS``.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while not acquire("choice"):
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
            # O_CREAT comes second: systems refuse it for another user's file in /tmp.
            with suppress(FileNotFoundError):
                return os.open(path, flags)
            with suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
                os.fchmod(descriptor, 0o644)  # other users must read it, whatever the umask
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
    """Close the locks in a forked data worker, which may live longer than its process."""
    for descriptor in HELD.values():
        os.close(descriptor)
    HELD.clear()


os.register_at_fork(after_in_child=_close_inherited)
