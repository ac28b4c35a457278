"""End a process of a run: when it is asked to, when its parent ends, when it fails.

In: signals, and the end of the process that started this one. Out: an exit status, 128 + the
signal's number. Of several processes that fail one tells why, and its end ends the others. A run
that trains handles signals in ``signals``, and leaves as agreed. Imports no torch.
"""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from harness.processes.launcher import launcher, number

log = logging.getLogger(__name__)

ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# An exception may only be what the end of another process looks like from here. Whoever ended
# first has said why, and ends this process within this time.
NOTICE_SECONDS = 1.0
# Of processes that fail in the same way the first one tells, and ends the others within this time.
TELL_SECONDS = 2.0
# A process that is to save once its launcher has ended gets this long to reach a safe point.
ORPHAN_SECONDS = 10.0
# Python runs signal handlers in the main thread only, which may be blocked in a collective.
BLOCKED_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # of Linux's prctl

# A notebook's process is not the run's to end: it gets an exception instead.
keeps_process = False
run_handler: Any = object()  # the signal handler of a run, which finishes its step first
handled_time = 0.0  # when it was last called
followed = 0  # pid of the parent that this process must not outlive; 0 where there is none
# The further ranks that this process started, as long as the run cannot go on without them.
ranks: "list[subprocess.Popen[bytes]]" = []


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
            call_later(1.0 if is_urgent else BLOCKED_SECONDS, _leave_if_blocked, signum, now)
        if followed and os.getppid() != followed:
            log.warning("The process %d, which started this one, has ended.", followed)
            call_later(ORPHAN_SECONDS, os.kill, os.getpid(), signal.SIGKILL)


def call_later(seconds: float, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function in a thread that does not keep this process alive."""
    timer = threading.Timer(seconds, function, arguments)
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

    The kernel takes the end of the thread that started this process for the parent's.
    """
    global followed
    followed = pid
    set_parent_signal(signal.SIGKILL)


def set_parent_signal(signum: int) -> None:
    """Choose what the parent's end sends: SIGTERM to save first, 0 where all is done."""
    if followed and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != followed:  # the kernel sends no signal any more
            os._exit(1)


def follow_as_worker() -> None:
    """Let a data worker end with its process; torch's own look takes seconds, or a sample.

    Only where the main thread forked it, for the kernel looks at the thread's end.
    """
    if threading.main_thread().name == "MainThread":
        follow(os.getppid())


def is_first_on_screen() -> bool:
    """Whether this process tells what all have found: srun has one screen, others one a machine."""
    this = launcher()
    return (this.rank if this.name == "srun" else number("LOCAL_RANK")) == 0


def before_telling(is_mistake: bool) -> None:
    """Wait as long as another process may tell the same error; its end then ends this one.

    Args:
        is_mistake: whether the error has its cause in this process, which a ``UserError`` has.
    """
    if not is_first_on_screen():
        time.sleep(TELL_SECONDS)
    elif not is_mistake and (ranks or launcher().is_one_of_several):
        time.sleep(NOTICE_SECONDS)
    end_ranks()


def let_first_leave() -> None:
    """Once all agreed to leave, let rank 0 finish: a launcher kills it when another one ends."""
    if not is_first_on_screen() and launcher().name != "python":
        time.sleep(TELL_SECONDS)


def end_ranks() -> None:
    """Kill the further ranks that this process started; it has said why the run ends."""
    processes, ranks[:] = list(ranks), []
    for process in processes:
        process.kill()


def leave(status: Any) -> NoReturn:
    """End this process, its ranks and its workers now, whatever it is waiting for."""
    if threading.current_thread() is threading.main_thread():
        if keeps_process:
            raise KeyboardInterrupt if status == 128 + signal.SIGINT else SystemExit(status)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    end_ranks()
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
