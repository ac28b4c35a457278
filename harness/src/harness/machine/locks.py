"""Locks that keep a GPU for the run that has chosen it, until the run's first process ends.

A lock is a bound name in Linux's abstract socket namespace, which all users of a machine share.
The system frees it when the process ends, however it ends, and no file is left behind.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from harness.errors import UserError

PREFIX = "train_"
WAIT_SECONDS = 30.0
HELD: dict[str, socket.socket] = {}  # by the name of what is locked


def acquire(name: str) -> bool:
    """Lock a GPU for as long as this process runs; ``False`` if another process has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0{PREFIX}{name}")
    except OSError:
        lock.close()
        return False
    HELD[name] = lock
    return True


def release(name: str) -> None:
    """Give a GPU back."""
    HELD.pop(name).close()


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
                f"Another process has been choosing GPUs for {WAIT_SECONDS:.0f} seconds.\n"
                "End it, or name the GPUs with CUDA_VISIBLE_DEVICES and leave out gpus=emptiest."
            )
        time.sleep(0.05)
    try:
        yield
    finally:
        release("choice")


def _close_inherited() -> None:
    """Close the locks in a forked data worker, which may live longer than its process."""
    for name in list(HELD):
        release(name)


os.register_at_fork(after_in_child=_close_inherited)
