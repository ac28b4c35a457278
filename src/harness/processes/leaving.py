"""Ways to end a process of a run. Imports no torch."""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

received = 0  # the last signal that asked this process to leave, while a run noted them
# A notebook's process is not the run's to end: what would end it is raised there.
keeps_process = False

ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Set where another process of the run failed that is the first one, and tells why.
first_has_failed = threading.Event()
PR_SET_PDEATHSIG = 1  # of Linux's prctl
# Functions that are called with the exit status before this process ends, to tell the others.
FAREWELLS: set[Callable[[int], None]] = set()


class AgreedExit(SystemExit):
    """Raised in every process at the same step, so that none waits for another."""


def answer_signals() -> None:
    """Leave at once when asked to, with 128 + the signal's number, while nothing needs saving.

    A thread does it: the main thread may be inside of an import, or wait for other processes.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for signum in ASKED_TO_LEAVE:
        signal.signal(signum, unclaimed)
    threading.Thread(target=_answer, args=(reader,), name="signals", daemon=True).start()


def unclaimed(signum: int, frame: FrameType | None) -> None:
    """Stand for the thread's answer; who installs another handler answers instead."""


def _answer(reader: socket.socket) -> None:
    while received := reader.recv(1):
        if signal.getsignal(received[0]) is unclaimed:
            leave(128 + received[0])


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let Linux's kernel end this process when its parent ends.

    Args:
        signum: the signal that ends it; 0 lets it live.
        parent: process that may have ended already, which the kernel does not tell any more.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if parent not in (None, os.getppid()):
            os._exit(1)


def leave(status: Any) -> NoReturn:
    """End this process and its workers now, whatever it is waiting for."""
    if threading.current_thread() is threading.main_thread():
        if keeps_process:
            raise KeyboardInterrupt if status == 128 + signal.SIGINT else SystemExit(status)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    for farewell in list(FAREWELLS):
        farewell(status)
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
