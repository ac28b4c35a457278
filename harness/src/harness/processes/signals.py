"""Handle the signals that ask a run to leave: note one, finish the step, save, leave together.

In: SIGTERM, SIGINT, SIGUSR1, SIGUSR2. Out: ``received``. Next: ``checkpoints.safe_point``.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytorch_lightning as pl

from harness.processes import leaving
from harness.processes.launcher import is_further_rank
from harness.processes.leaving import ASKED_TO_LEAVE, leave
from harness.upstream.processes import keep_lightning_from_signals

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0  # schedulers kill ten or more seconds after they have asked


class Signals:
    """Note a signal and finish the step; a second Ctrl-C leaves at once.

    The handler does nothing else, because it may run inside a collective operation.
    """

    def __init__(self) -> None:
        self.received, self.received_time = 0, 0.0
        self.wait_for_step = False  # whether training has begun, so that there is something to save
        self.is_validating = False  # whether the next safe point may be far away
        self.before_leaving: Callable[[], None] | None = None  # waits for what is being written
        self.before: dict[int, Any] = {}
        self.pid = os.getpid()

    def install(self, trainer: pl.Trainer) -> None:
        """Handle the signals in this process, and keep Lightning from it."""
        keep_lightning_from_signals(trainer)
        if self.before or threading.current_thread() is not threading.main_thread():
            return
        self.pid = os.getpid()
        leaving.run_handler = self._note
        if not is_further_rank():  # which cannot save without its parent, the first rank
            leaving.set_parent_signal(signal.SIGTERM)  # all get it, and save together
        self.before = {signum: signal.signal(signum, self._note) for signum in ASKED_TO_LEAVE}

    def restore(self) -> None:
        """Put the handlers from before back."""
        if self.before:
            leaving.set_parent_signal(signal.SIGKILL)
        while self.before:
            signal.signal(*self.before.popitem())
        self.wait_for_step = False
        self.received = 0

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:
            return  # a worker that has just been forked
        is_second = signum == signal.SIGINT and self.received == signal.SIGINT
        self.received, self.received_time = signum, time.monotonic()
        leaving.handled_time = self.received_time
        if is_second or not self.wait_for_step:
            leave(128 + signum)
        leaving.call_later(PATIENCE_SECONDS, self.leave_if_late)

    def leave_if_late(self) -> None:
        """Leave a validation without a checkpoint where no safe point has come in time."""
        is_late = self.received and time.monotonic() - self.received_time >= PATIENCE_SECONDS
        if is_late and self.is_validating and self.wait_for_step:
            log.warning(
                "%s: left in the middle of a validation. The run goes on from its last checkpoint.",
                signal.Signals(self.received).name,
            )
            if self.before_leaving is not None:
                self.before_leaving()
            leave(128 + self.received)


def ignore_signals() -> None:
    """Let a data worker live until its process ends it, though a signal goes to the whole group."""
    for signum in ASKED_TO_LEAVE:
        signal.signal(signum, signal.SIG_IGN)


def end_workers() -> None:
    """Kill the data workers that are left at this process's end, where torch has not ended them.

    An exception that has passed through a loader keeps it alive, and Python's own end would wait
    for ever: it asks by SIGTERM.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
