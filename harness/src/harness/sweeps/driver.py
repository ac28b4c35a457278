"""Run the jobs of a sweep side by side, each in a process and a folder of its own.

In: a queue of jobs, and slots. Out: the signal that stopped the sweep, or 0. Next:
``command.main`` in each process. What is left to do is read from the jobs' folders, so a driver
that was killed loses nothing: its jobs save and end with it, and the next driver goes on. Imports
no torch.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from harness import record
from harness.processes import leaving, parent
from harness.runs import reading

SCREEN = "screen.log"  # in a job's folder: what its process has printed
POLL_SECONDS = 0.1


@dataclass
class Job:
    """One run of a sweep: its number, the words of its command, and its folder."""

    number: int
    words: list[str]
    folder: Path

    @property
    def run(self) -> reading.RunFiles:
        """What its folder says now."""
        return reading.read(self.folder)

    @property
    def status(self) -> str:
        """``waiting``, or the status of its run."""
        return self.run.status if self.folder.exists() else "waiting"


class Queue:
    """The jobs of a sweep; ``study.Study`` adds those that Optuna asks for.

    Attributes:
        jobs: all jobs so far.
        waiting: those that this driver has not looked at.
        num_jobs: how many there will be.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.waiting, self.num_jobs = [*jobs], [*jobs], len(jobs)

    def next(self) -> Job | None:
        """Take a job that has not finished; one that has failed is tried again."""
        while self.waiting:
            job = self.waiting.pop(0)
            if job.status != "finished":
                return job
            self.ended(job, job.run)
        return None

    def ended(self, job: Job, run: reading.RunFiles) -> None:
        """Take note of how a job has ended."""


class Driver:
    """Starts jobs while there are free slots, and reports how they end.

    Args:
        queue: what there is to do.
        program: the command that takes a job's words.
        slots: variables of the environment for each of the jobs that run at a time.
    """

    def __init__(
        self, queue: Queue, program: Sequence[str], slots: Sequence[dict[str, str]]
    ) -> None:
        self.queue, self.program, self.free = queue, program, [*slots]
        self.running: list[tuple[Job, subprocess.Popen[bytes], dict[str, str]]] = []
        self.signal = 0  # the first that asked the sweep to stop

    def run(self) -> int:
        """Run what is left of the sweep, and return the signal that stopped it, or 0."""
        before = {n: signal.signal(n, self._on_signal) for n in leaving.ASKED_TO_LEAVE}
        try:
            # Jobs whose driver was killed may still be saving.
            while not self.signal and any(job.status == "running" for job in self.queue.waiting):
                time.sleep(POLL_SECONDS)
            while not self.signal and self._start_jobs():
                self._wait()
            if self.running:
                name, num = signal.Signals(self.signal).name, len(self.running)
                print(
                    f"{name}: {num} jobs finish their step and save. Ctrl-C again leaves at once."
                )
            for _, process, _ in self.running:
                process.send_signal(self.signal)
            while self.running:
                self._wait()
            return self.signal
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start_jobs(self) -> bool:
        """Start jobs in free slots, and return whether any job runs."""
        while self.free and (job := self.queue.next()):
            slot = self.free.pop(0)
            job.folder.mkdir(exist_ok=True)
            with (job.folder / SCREEN).open("ab") as screen:
                process = subprocess.Popen(
                    [*self.program, *job.words],
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=screen,
                    env=parent.job_environment(job.folder) | slot,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the driver alone
                )
            self.running.append((job, process, slot))
            print(f"job {job.number} starts: {shlex.join(job.words)}", flush=True)
        return bool(self.running)

    def _wait(self) -> None:
        """Wait a moment, and report jobs that have ended meanwhile."""
        time.sleep(POLL_SECONDS)
        for job, process, slot in [*self.running]:
            if (code := process.poll()) is None:
                continue
            self.running.remove((job, process, slot))
            self.free.append(slot)
            run = job.run
            # A run that has begun notes its own failure; a code above 128 stands for a signal.
            if 0 < code <= 128 and run.status != "failed" and not run.record.get("starts"):
                record.note(job.folder, status="failed", reason=f"exit {code}: see {SCREEN}")
                run = job.run
            text = f": {run.facts['reason']}"
            if run.status == "finished":
                text = f", best {run.objective[0]} {run.best}" if run.objective[0] else ""
            print(f"job {job.number} {run.status}{text}", flush=True)
            self.queue.ended(job, run)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note that the sweep is to stop; a second Ctrl-C leaves at once."""
        if self.signal and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = self.signal or number
