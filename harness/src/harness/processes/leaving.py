"""Ways to end a process of a run. Imports no torch."""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

log = logging.getLogger(__name__)

received = 0  # the last signal that asked this process to leave, while a run noted them
# A notebook's process is not the run's to end: what would end it is raised there.
keeps_process = False

ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Set where another process of the run failed that is the first one, and tells why.
first_has_failed = threading.Event()
connected = threading.Event()  # set when ``Peers`` connects the processes and notices an end
PR_SET_PDEATHSIG = 1  # of Linux's prctl
# A process that is to save once its launcher has ended gets this long to reach a safe point.
ORPHAN_SECONDS = 10.0
# A main thread that waits in torch hears no signal: of another process that will not come, perhaps.
DEAF_SECONDS = 60.0
noting: Any = object()  # the handler of a run, which finishes its step first
heard_time = 0.0  # when it has last heard one
followed = 0  # the process that this one must not outlive; 0 where there is none
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
    last_time = 0.0
    while received := reader.recv(1):
        if signal.getsignal(received[0]) is unclaimed:
            leave(128 + received[0])
        if signal.getsignal(received[0]) == noting:  # an author's own handler is left alone
            now = time.monotonic()
            # Torchrun passes on what a terminal or Slurm has sent to all: that is no second one.
            is_second = heard_time < last_time - 1 and now - last_time > 0.5
            last_time = now
            seconds = 1.0 if is_second and received[0] == signal.SIGINT else DEAF_SECONDS
            deaf = threading.Timer(seconds, _leave_if_deaf, (received[0], now))
            deaf.daemon = True
            deaf.start()
        if followed and os.getppid() != followed:
            log.warning("The process %d, which has started this one, has ended.", followed)
            timer = threading.Timer(ORPHAN_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def _leave_if_deaf(signum: int, asked_time: float) -> None:
    """Leave for the main thread where it has not heard a signal since."""
    if heard_time < asked_time - 1 and signal.getsignal(signum) == noting:
        log.warning(
            "%s: left without saving, as the step does not end: another process may be missing in "
            "a collective operation. The run goes on from its last checkpoint.",
            signal.Signals(signum).name,
        )
        leave(128 + signum)


def follow(pid: int) -> None:
    """Let Linux's kernel kill this process when its parent ends, or end it if that has ended.

    Args:
        pid: the parent. It must wait for this process in the thread that has started it: the
            kernel takes that thread's end for the parent's.
    """
    global followed
    followed = pid
    arm(signal.SIGKILL)


def arm(signum: int) -> None:
    """Choose the signal that follows on the end of the process that is followed, if one is.

    Args:
        signum: SIGTERM where there is something to save, 0 where another one watches.
    """
    if followed and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != followed:  # the kernel does not tell any more
            os._exit(1)


def follow_as_worker() -> None:
    """Let a data worker end with its process; torch's own look takes seconds, or a sample.

    Not where another thread than the main one has forked it: the kernel takes the end of that for
    the process's.
    """
    if threading.main_thread().name == "MainThread":
        follow(os.getppid())


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
