"""End a process of a run: after a signal, when its parent process ends, or after an error.

In: signals, and the end of the parent process. Out: an exit status: 128 + the signal's number, or
75 under srun. If several processes fail, one of them prints the error, and its end ends the others.
A training run handles signals by ``SignalHandlers``: ``checkpoints.safe_point`` then saves and
exits. This module imports no torch.
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
from typing import Any, NoReturn

from harness.distributed.launcher import is_child_rank, launcher, number

log = logging.getLogger(__name__)

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# An exception may be only the effect of the end of another rank. That rank has printed the cause,
# and ends this process within this time.
NOTICE_SECONDS = 1.0
# If several processes fail in the same way, local rank 0 prints the error, and ends the others
# within this time.
REPORT_SECONDS = 2.0
# After Ctrl-C, a process may get the signal from the terminal and once more from Slurm. Two signals
# within this time count as one.
SAME_SECONDS = 0.5
# After its launcher has ended, a process has this long to reach a safe point and save.
ORPHAN_SECONDS = 10.0
# Exit statuses of an srun task. srun exits with the highest status of its tasks. If one task fails,
# Slurm ends the others with a signal, and they exit with RESUMABLE. So FAILED must be higher.
RESUMABLE, FAILED = 75, 100
PATIENCE_SECONDS = 5.0  # schedulers send SIGKILL ten or more seconds after the first signal
PR_SET_PDEATHSIG = 1  # a constant of Linux's prctl

# In a notebook, the run must not end the process: it raises an exception instead.
is_notebook = False
parent_pid = 0  # pid of the parent that this process must not outlive; 0 if there is none
# The ranks that this process started, as long as the run needs them.
ranks: "list[subprocess.Popen[bytes]]" = []


def exit_on_signals() -> None:
    """Start a thread that ends this process at a signal, with status 128 + the signal's number.

    The thread acts before and after the training, when nothing needs saving. During the training
    ``SignalHandlers`` replaces it. The main thread cannot do this work, because it may be in an
    import or in a collective operation.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for signum in EXIT_SIGNALS:
        signal.signal(signum, ignore_in_main_thread)
    threading.Thread(target=_answer, args=(reader,), name="signals", daemon=True).start()


def ignore_in_main_thread(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the thread ends the process, unless another handler replaces this one."""


def _answer(reader: socket.socket) -> None:
    """Wait for signals, whose numbers Python writes to the socket, and end this process."""
    first_time = math.inf
    while received := reader.recv(1):
        signum, handler = received[0], signal.getsignal(received[0])
        if handler is ignore_in_main_thread:
            exit_now(128 + signum)
        # Whether the library's handler is installed, and not the user's.
        is_own = isinstance(getattr(handler, "__self__", None), SignalHandlers)
        if is_own and signum == signal.SIGINT:
            if time.monotonic() > first_time + SAME_SECONDS:
                log.warning(
                    "SIGINT: the run exits without saving. Use resume=auto to resume it from its "
                    "last checkpoint."
                )
                exit_now(128 + signum)
            first_time = min(first_time, time.monotonic())
        if parent_pid and os.getppid() != parent_pid:
            log.warning("The parent process %d of this process has ended.", parent_pid)
            _call_later(ORPHAN_SECONDS, os.kill, os.getpid(), signal.SIGKILL)


def _call_later(seconds: float, function: Any, *arguments: Any) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True  # the timer does not keep this process alive
    timer.start()


class SignalHandlers:
    """Handlers that store a signal, so that the run finishes its step and saves.

    A second Ctrl-C ends the process at once. The handlers do nothing else, because they may run
    inside a collective operation.
    """

    def __init__(self) -> None:
        self.received, self.received_time = 0, 0.0  # the last signal's number and time
        self.wait_for_step = False  # whether training has begun, so that there is a state to save
        self.is_validating = False  # whether the next safe point may be far away
        self.before_leaving: Any = lambda: None  # waits until files are written
        self.before: dict[int, Any] = {}  # handlers to restore, by signal
        self.pid = os.getpid()

    def install(self) -> None:
        """Install the handlers in this process."""
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        self.pid = os.getpid()
        # If rank 0 dies, the kernel kills a rank that rank 0 started. Only a process under another
        # launcher gets SIGTERM instead, to save.
        if not is_child_rank():
            set_parent_signal(signal.SIGTERM)
        self.before = {signum: signal.signal(signum, self.note) for signum in EXIT_SIGNALS}

    def restore(self) -> None:
        """Restore the handlers from before ``install``."""
        if self.before:
            set_parent_signal(signal.SIGKILL)
        while self.before:
            signal.signal(*self.before.popitem())
        self.wait_for_step = False
        self.received = 0

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread: store it, or end the process."""
        if os.getpid() != self.pid:
            return  # in a data worker that was just forked
        is_later = time.monotonic() > self.received_time + SAME_SECONDS
        is_second = signum == signal.SIGINT == self.received and is_later
        self.received, self.received_time = signum, time.monotonic()
        if is_second or not self.wait_for_step:
            exit_now(128 + signum)
        _call_later(PATIENCE_SECONDS, self.leave_if_late)

    def leave_if_late(self) -> None:
        """End a validating process that reached no safe point in PATIENCE_SECONDS."""
        is_late = self.received and time.monotonic() - self.received_time >= PATIENCE_SECONDS
        if is_late and self.is_validating and self.wait_for_step:
            if is_notebook:  # in a notebook: ``note`` raises in the main thread
                _thread.interrupt_main()
                return
            log.warning(
                "%s: the run exits in the middle of a validation. Use resume=auto to resume it "
                "from its last checkpoint.",
                signal.Signals(self.received).name,
            )
            self.before_leaving()
            exit_now(128 + self.received)


def end_with_parent(pid: int) -> None:
    """Let the Linux kernel kill this process when its parent ends; exit if the parent has ended.

    For the kernel, the parent ends when the thread that started this process ends.
    """
    global parent_pid
    parent_pid = pid
    set_parent_signal(signal.SIGKILL)


def set_parent_signal(signum: int) -> None:
    """Set the signal that the kernel sends to this process when its parent ends; 0 for none."""
    if parent_pid and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if os.getppid() != parent_pid:  # the parent has ended, so the kernel sends no signal
            os._exit(1)


def set_up_data_worker() -> None:
    """Let a data worker ignore signals and end with its training process.

    Signals go to the whole process group, and the training process still needs its workers. torch
    notices the parent's end only after seconds, or after a sample. The kernel acts at a thread's
    end, so only a worker that the main thread forked follows its parent.
    """
    for signum in EXIT_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    if threading.main_thread().name == "MainThread":
        end_with_parent(os.getppid())


def kill_data_workers() -> None:
    """Kill the data workers that still run at this process's exit.

    A traceback through a loader keeps the loader alive, so torch does not end its workers. Python
    would wait for them for ever, because it sends SIGTERM, which they ignore.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a worker is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def is_reporting_rank() -> bool:
    """Return whether this process reports for the others on its screen.

    srun has one screen for all ranks; other launchers have one per machine.
    """
    this = launcher()
    return (this.rank if this.name == "srun" else number("LOCAL_RANK")) == 0


def wait_for_first_failure(is_mistake: bool) -> None:
    """Wait while another process may report the same error. The other's end then ends this one.

    Args:
        is_mistake: whether this process itself caused the error, as with a ``UserError``.
    """
    if not is_reporting_rank():
        time.sleep(REPORT_SECONDS)
    elif not is_mistake and (ranks or launcher().has_several_processes):
        time.sleep(NOTICE_SECONDS)
    kill_ranks()


def let_rank_0_exit_first() -> None:
    """Let rank 0 exit first when all ranks stop, because a launcher kills it if another exits."""
    if not is_reporting_rank() and launcher().name != "python":
        time.sleep(REPORT_SECONDS)


def release_ranks() -> "list[subprocess.Popen[bytes]]":
    """Return the ranks that this process started; from now on, their end does not end the run."""
    processes, ranks[:] = list(ranks), []
    return processes


def kill_ranks() -> None:
    """Kill the ranks that this process started. Call it after the error is reported."""
    for process in release_ranks():
        process.kill()


def exit_now(status: Any) -> NoReturn:
    """Kill this process's ranks and workers, and exit at once, even if the main thread waits."""
    if threading.current_thread() is threading.main_thread():
        if is_notebook:
            raise KeyboardInterrupt if status == 128 + signal.SIGINT else SystemExit(status)
        # torch's handler raises if a worker is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_ranks()
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    status = status if isinstance(status, int) else 1
    if is_srun_task():
        is_asked = status - 128 in (signal.SIGTERM, signal.SIGUSR1)
        status = RESUMABLE if is_asked else FAILED if status == 1 else status
    os._exit(status)


def is_srun_task() -> bool:
    """Return whether srun started this process or one of its ancestors."""
    return "SLURM_STEP_NUM_TASKS" in os.environ
