"""End a process of a run: when it is asked to, and when its parent ends. Imports no torch.

In: signals, and the end of the process that started this one. Out: an exit status, 128 + the
signal's number. A run that trains handles signals in ``signals``, and leaves as agreed.
"""

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

received = 0  # the last signal that asked this process to leave, while a run handled them
# A notebook's process is not the run's to end: it gets an exception instead.
keeps_process = False

ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# Set where the first process of the run failed, which says why.
first_has_failed = threading.Event()
connected = threading.Event()  # set when ``Peers`` connects the processes and notices an end
PR_SET_PDEATHSIG = 1  # of Linux's prctl
# A process that is to save once its launcher has ended gets this long to reach a safe point.
ORPHAN_SECONDS = 10.0
# Python runs signal handlers in the main thread only, which may be blocked in a collective.
BLOCKED_SECONDS = 60.0
run_handler: Any = object()  # the signal handler of a run, which finishes its step first
handled_time = 0.0  # when it was last called
followed = 0  # pid of the parent that this process must not outlive; 0 where there is none
# Functions that are called with the exit status before this process ends, to tell the others.
farewells: set[Callable[[int], None]] = set()


class AgreedExit(SystemExit):
    """Raised in every process at the same step, so that none waits for another."""


def answer_signals() -> None:
    """Leave at once when asked to, with 128 + the signal's number, while nothing needs saving.

    A thread does it: the main thread may be in the middle of an import, or wait for others.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for signum in ASKED_TO_LEAVE:
        signal.signal(signum, leave_to_thread)
    threading.Thread(target=_answer, args=(reader,), name="signals", daemon=True).start()


def leave_to_thread(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the thread answers. Whoever installs another handler answers instead."""


def _answer(reader: socket.socket) -> None:
    last_time = 0.0
    while woken := reader.recv(1):
        signum, handler = woken[0], signal.getsignal(woken[0])
        if handler is leave_to_thread:
            leave(128 + signum)
        if handler == run_handler:  # an author's own handler is left alone
            now = time.monotonic()
            # torchrun passes on what a terminal or Slurm has sent to all: that is no second one.
            is_second = handled_time < last_time - 1 and now - last_time > 0.5
            last_time = now
            is_urgent = is_second and signum == signal.SIGINT
            _later(1.0 if is_urgent else BLOCKED_SECONDS, _leave_if_blocked, signum, now)
        if followed and os.getppid() != followed:
            log.warning("The process %d, which has started this one, has ended.", followed)
            _later(ORPHAN_SECONDS, os.kill, os.getpid(), signal.SIGKILL)


def _later(seconds: float, call: Callable[..., object], *arguments: Any) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()


def _leave_if_blocked(signum: int, asked_time: float) -> None:
    """Leave where the main thread has not run its handler since the signal."""
    if handled_time < asked_time - 1 and signal.getsignal(signum) == run_handler:
        log.warning(
            "%s: left without saving, as the step does not end: another process may be missing in "
            "a collective operation. The run goes on from its last checkpoint.",
            signal.Signals(signum).name,
        )
        leave(128 + signum)


def follow(pid: int) -> None:
    """Let Linux's kernel kill this process when its parent ends, or end it if that has ended.

    Args:
        pid: the parent. The thread of it that started this process must live as long: the kernel
            takes that thread's end for the parent's.
    """
    global followed
    followed = pid
    set_parent_signal(signal.SIGKILL)


def set_parent_signal(signum: int) -> None:
    """Choose the signal that this process gets when the parent that it follows ends.

    Args:
        signum: SIGTERM where there is something to save, 0 where ``Peers`` watches.
    """
    if followed and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != followed:  # the kernel does not tell any more
            os._exit(1)


def follow_as_worker() -> None:
    """Let a data worker end with its process; torch's own look takes seconds, or a sample.

    Not where another thread than the main one forked it: the kernel takes the end of that thread
    for the process's.
    """
    if threading.main_thread().name == "MainThread":
        follow(os.getppid())


def leave(status: Any) -> NoReturn:
    """End this process and its workers now, whatever it is waiting for."""
    if threading.current_thread() is threading.main_thread():
        if keeps_process:
            raise KeyboardInterrupt if status == 128 + signal.SIGINT else SystemExit(status)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    for farewell in list(farewells):
        farewell(status)
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
