"""Run the jobs of a sweep side by side until all have ended, whatever becomes of one of them.

What has been done is read from the jobs' folders, so that a driver which was killed loses nothing:
its jobs end with it, and the next one goes on. Nothing here imports torch.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from harness import record
from harness.processes import leaving
from harness.sweeps.jobs import SCREEN, Job, Jobs
from harness.sweeps.slots import Needs, Slots
from harness.sweeps.view import View

POLL_SECONDS = 0.1
ROOM_SECONDS = 1.0  # between two looks for room for a job that had none


@dataclass
class Running:
    """A job's process, and its shares of the machine."""

    job: Job
    process: "subprocess.Popen[bytes]"
    shares: set[int]


class Driver:
    """Starts jobs, waits for them, and takes note of how they end.

    Args:
        jobs: what there is to do.
        slots: where there is room for them.
        program: a command that takes a job's words.
        needs_of: what the job of some words computes on.
        view: shows what happens.
    """

    def __init__(
        self,
        jobs: Jobs,
        slots: Slots,
        program: Sequence[str],
        needs_of: Callable[[list[str]], tuple[Needs, list[str]]],
        view: View,
    ) -> None:
        self.jobs, self.slots, self.view = jobs, slots, view
        self.program, self.needs_of = program, needs_of
        self.running: list[Running] = []
        self.refused: Job | None = None  # there was no room for it
        self.last_message, self.next_look = "", 0.0  # that there is no room; when to look again
        self.signal = 0  # that has asked the sweep to stop

    def run(self) -> int:
        """Run what is left of the sweep.

        Returns:
            The signal that has stopped it; 0 where all jobs have ended.
        """
        has_passed_on = False
        with self._answering():
            while True:
                if self.signal and not has_passed_on:
                    has_passed_on = True
                    self._pass_on()
                for done in [one for one in self.running if one.process.poll() is not None]:
                    self._end(done)
                if not self.signal and (not self.refused or time.monotonic() > self.next_look):
                    self._fill()
                nothing_left = self.refused is None and not self.jobs.pending
                if not self.running and (self.signal or nothing_left):
                    return self.signal
                time.sleep(POLL_SECONDS)

    def _pass_on(self) -> None:
        """Let the jobs finish their step and save."""
        self.view.say(
            f"{signal.Signals(self.signal).name}: {len(self.running)} running jobs "
            "finish their step and save. Ctrl-C again leaves at once."
        )
        for one in self.running:
            one.process.send_signal(self.signal)

    def _fill(self) -> None:
        """Start jobs while there is room."""
        while not self.signal and self.slots.free and (job := self.refused or self.jobs.next()):
            self.refused = None
            job.folder.mkdir(exist_ok=True)
            (job.folder / SCREEN).touch()
            needs, words = self.needs_of(job.words)
            started = self.slots.start([*self.program, *words], job.folder, needs)
            if started is None:
                self.refused, self.next_look = job, time.monotonic() + ROOM_SECONDS
                if not self.running and self.last_message != self.slots.why_not:
                    self.last_message = self.slots.why_not
                    self.view.say(f"Waits for room for job {job.number}. {self.last_message}")
                return
            self.last_message = ""
            self.running.append(Running(job, *started))
            self.view.started(job)

    def _end(self, done: Running) -> None:
        """Take note of how a job has ended."""
        self.running.remove(done)
        self.slots.free |= done.shares
        self.next_look = 0.0
        job, code = done.job, done.process.returncode
        is_cut_off = code < 0 or code - 128 in (*leaving.ASKED_TO_LEAVE, signal.SIGKILL)
        noted = record.read(job.folder)  # without an end where another rank has died
        is_cut_off |= bool(noted.get("starts")) and noted.get("status") is None
        if code and not is_cut_off and job.status != "failed":
            record.note(job.folder, status="failed", reason=f"exit {code}: see {SCREEN}")
        status = job.status
        self.jobs.ended(job, status)
        self.view.ended(job, status)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._asked) for number in leaving.ASKED_TO_LEAVE}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        """Note what asks the sweep to stop; a second Ctrl-C leaves."""
        if self.signal and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = self.signal or number
