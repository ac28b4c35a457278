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
WATCH_SECONDS = 1.0  # between two looks at what running jobs have logged


@dataclass
class Running:
    """A job's process.

    Attributes:
        job: what it computes.
        process: that computes it.
        shares: of the machine.
        log_size: bytes that earlier starts have left in its log.
        verdict: why it was stopped for good, if it was.
    """

    job: Job
    process: "subprocess.Popen[bytes]"
    shares: set[int]
    log_size: int
    verdict: str = ""


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
        self.told, self.again = "", 0.0  # that there is no room; when to look again
        self.signal = 0  # that has asked the sweep to stop
        self.num_asked = 0  # jobs that ran then

    def run(self) -> int:
        """Run what is left of the sweep.

        Returns:
            The signal that has stopped it; 0 where all jobs have ended.
        """
        watched, has_told = 0.0, False
        with self._answering(), self.view:
            while True:
                if self.signal and not has_told:
                    has_told = True
                    self.view.say(
                        f"{signal.Signals(self.signal).name}: {self.num_asked} running jobs "
                        "finish their step and save. Ctrl-C again leaves at once."
                    )
                for done in [one for one in self.running if one.process.poll() is not None]:
                    self._end(done)
                if not self.signal and (not self.refused or time.monotonic() > self.again):
                    self._fill()
                nothing_left = self.refused is None and not self.jobs.pending
                if not self.running and (self.signal or nothing_left):
                    return self.signal
                if time.monotonic() > watched + WATCH_SECONDS:
                    watched = time.monotonic()
                    self._watch()
                time.sleep(POLL_SECONDS)

    def _fill(self) -> None:
        """Start jobs while there is room."""
        while not self.signal and self.slots.free and (job := self.refused or self.jobs.next()):
            self.refused = None
            job.folder.mkdir(exist_ok=True)
            log = job.folder / SCREEN
            log.touch()
            size = log.stat().st_size
            needs, words = self.needs_of(job.words)
            started = self.slots.start([*self.program, *words], job.folder, log, needs)
            if started is None:
                self.refused, self.again = job, time.monotonic() + WATCH_SECONDS
                if not self.running and self.told != self.slots.why_not:
                    self.told = self.slots.why_not
                    self.view.say(f"Waits for room for job {job.number}. {self.told}")
                return
            self.told = ""
            self.running.append(Running(job, *started, size))
            self.view.started(job)
            if self.signal:  # which came while it was started
                self.num_asked += 1
                self.running[-1].process.send_signal(self.signal)

    def _end(self, done: Running) -> None:
        """Take note of how a job has ended."""
        self.running.remove(done)
        self.slots.free |= done.shares
        self.again = 0.0
        job, code = done.job, done.process.returncode
        is_cut_off = code < 0 or code - 128 in (*leaving.ASKED_TO_LEAVE, signal.SIGKILL)
        noted = record.read(job.folder)  # without an end where another rank has died
        is_cut_off |= bool(noted.get("starts")) and noted.get("status") is None
        if done.verdict and job.status != "finished":
            record.note(job.folder, status="pruned", reason=done.verdict)
        elif code and not is_cut_off and job.status != "failed":
            record.note(job.folder, status="failed", reason=last_words(done) or f"exit {code}")
        status = job.status
        self.jobs.ended(job, status)
        self.view.ended(job, status)

    def _watch(self) -> None:
        """Look at what running jobs have logged."""
        for one in self.running:
            if not one.verdict and (verdict := self.jobs.is_hopeless(one.job)):
                one.verdict = verdict
                one.process.terminate()  # all its processes finish their step
        self.view.show([one.job for one in self.running], self.jobs)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._asked) for number in leaving.ASKED_TO_LEAVE}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        """Let the jobs finish their step and save; a second Ctrl-C leaves."""
        is_second = self.signal and number == signal.SIGINT
        if not self.signal:
            self.signal, self.num_asked = number, len(self.running)
        for one in self.running:
            one.process.send_signal(number)
        if is_second:
            self.view.close()
            os._exit(128 + number)


def last_words(done: Running) -> str:
    """Why a job has failed that has not noted it itself: what it has said last."""
    with (done.job.folder / SCREEN).open("rb") as file:
        file.seek(done.log_size)
        lines = file.read().decode(errors="replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        return ""
    is_traceback = any(line.startswith("Traceback") for line in lines)
    return lines[-1] if is_traceback else lines[0]
