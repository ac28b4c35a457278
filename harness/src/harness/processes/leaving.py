"""End a process of a run: when it is asked to, when its parent ends, when it fails.

In: signals, and the end of the process that started this one. Out: an exit status, 128 + the
signal's number, or 75 under srun. Of several processes that fail one tells why, and its end ends
the others. A run that trains has ``Signals``: ``checkpoints.safe_point`` saves and leaves. Imports
no torch.
"""

import _thread
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from harness.processes.launcher import is_further_rank, launcher, number

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)

ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# An exception may only be what the end of another process looks like from here. Whoever ended
# first has said why, and ends this process within this time.
NOTICE_SECONDS = 1.0
# Of processes that fail in the same way the first one tells, and ends the others within this time.
TELL_SECONDS = 2.0
# Slurm passes on what a terminal has sent to all: two signals within this time are one.
SAME_SECONDS = 0.5
# A process that is to save once its launcher has ended gets this long to reach a safe point.
ORPHAN_SECONDS = 10.0
# Exit statuses of a task of srun, which ends with the highest of its tasks': where one fails, Slurm
# ends the others, and these must not look as if all were asked to leave and can go on.
CAN_GO_ON, FAILED = 75, 100
PATIENCE_SECONDS = 5.0  # schedulers kill ten or more seconds after they have asked
PR_SET_PDEATHSIG = 1  # of Linux's prctl

# A notebook's process is not the run's to end: it gets an exception instead.
keeps_process = False
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
    first_time = math.inf
    while woken := reader.recv(1):
        signum, handler = woken[0], signal.getsignal(woken[0])
        if handler is leave_to_thread:
            leave(128 + signum)
        is_run = isinstance(getattr(handler, "__self__", None), Signals)  # not an author's handler
        if is_run and signum == signal.SIGINT:
            # Slurm passes on what a terminal has sent to all: that is no second one.
            if time.monotonic() > first_time + SAME_SECONDS:
                log.warning("SIGINT: left without saving. Its last checkpoint can be resumed.")
                leave(128 + signum)
            first_time = min(first_time, time.monotonic())
        if followed and os.getppid() != followed:
            log.warning("The process %d, which started this one, has ended.", followed)
            _call_later(ORPHAN_SECONDS, os.kill, os.getpid(), signal.SIGKILL)


def _call_later(seconds: float, function: Any, *arguments: Any) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True  # it does not keep this process alive
    timer.start()


class Signals:
    """Note a signal and finish the step; a second Ctrl-C leaves at once.

    The handler does nothing else, because it may run inside a collective operation.
    """

    def __init__(self) -> None:
        self.received, self.received_time = 0, 0.0
        self.wait_for_step = False  # whether training has begun, so that there is something to save
        self.is_validating = False  # whether the next safe point may be far away
        self.before_leaving: Any = lambda: None  # waits for what is being written
        self.before: dict[int, Any] = {}
        self.pid = os.getpid()

    def install(self) -> None:
        """Handle the signals in this process."""
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        self.pid = os.getpid()
        # A further rank cannot save without its parent, the first one, and dies with it.
        if not is_further_rank():
            set_parent_signal(signal.SIGTERM)  # all get it, and save together
        self.before = {signum: signal.signal(signum, self.note) for signum in ASKED_TO_LEAVE}

    def restore(self) -> None:
        """Put the handlers from before back."""
        if self.before:
            set_parent_signal(signal.SIGKILL)
        while self.before:
            signal.signal(*self.before.popitem())
        self.wait_for_step = False
        self.received = 0

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        if os.getpid() != self.pid:
            return  # a worker that has just been forked
        is_later = time.monotonic() > self.received_time + SAME_SECONDS
        is_second = signum == signal.SIGINT == self.received and is_later
        self.received, self.received_time = signum, time.monotonic()
        if is_second or not self.wait_for_step:
            leave(128 + signum)
        _call_later(PATIENCE_SECONDS, self.leave_if_late)

    def leave_if_late(self) -> None:
        """Leave a validation without a checkpoint where no safe point has come in time."""
        is_late = self.received and time.monotonic() - self.received_time >= PATIENCE_SECONDS
        if is_late and self.is_validating and self.wait_for_step:
            if keeps_process:  # of a notebook: ``note`` leaves, in the main thread
                _thread.interrupt_main()
                return
            log.warning(
                "%s: left in the middle of a validation. The run goes on from its last checkpoint.",
                signal.Signals(self.received).name,
            )
            self.before_leaving()
            leave(128 + self.received)


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


def be_data_worker() -> None:
    """Let a data worker live until its process ends, though signals go to the whole group.

    torch's own look for that end takes seconds, or a sample. The kernel looks at a thread's end, so
    only a worker follows that the main thread forked.
    """
    for signum in ASKED_TO_LEAVE:
        signal.signal(signum, signal.SIG_IGN)
    if threading.main_thread().name == "MainThread":
        follow(os.getppid())


def end_data_workers() -> None:
    """Kill the data workers that are left at this process's end, where torch has not ended them.

    An exception that has passed through a loader keeps it alive, and Python's own end would wait
    for ever: it asks by SIGTERM.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def is_first_on_screen() -> bool:
    """Return whether this process reports for all: srun has one screen, others one per machine."""
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
    """Wait for rank 0 after all agreed to leave: a launcher kills it when another one ends."""
    if not is_first_on_screen() and launcher().name != "python":
        time.sleep(TELL_SECONDS)


def release_ranks() -> "list[subprocess.Popen[bytes]]":
    """Return the further ranks, which may end from now on."""
    processes, ranks[:] = list(ranks), []
    return processes


def end_ranks() -> None:
    """Kill the further ranks that this process started; it has said why the run ends."""
    for process in release_ranks():
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
    status = status if isinstance(status, int) else 1
    if is_task_of_slurm():
        is_asked = status - 128 in (signal.SIGTERM, signal.SIGUSR1)
        status = CAN_GO_ON if is_asked else FAILED if status == 1 else status
    os._exit(status)


def is_task_of_slurm() -> bool:
    """Return whether srun started this process, or one before it."""
    return "SLURM_STEP_NUM_TASKS" in os.environ
