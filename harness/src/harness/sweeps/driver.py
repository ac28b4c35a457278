"""Run the jobs of a sweep side by side, each in a process of its own, until all have ended.

In: a queue of jobs, and a command that takes a job's words. Out: the signal that stopped the sweep,
or 0. What has been done is read from the jobs' folders, so that a driver that was killed loses
nothing: its jobs save and end with it, and the next driver goes on. Imports no torch.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from harness import record
from harness.errors import UserError
from harness.machine import choice, limits, num_gpus
from harness.processes import launch, leaving
from harness.runs import reading

SCREEN = "screen.log"  # in a job's folder: what it has printed
POLL_SECONDS = 0.1
WAIT_SECONDS = 1.0  # until GPUs are looked for again


@dataclass
class Job:
    """One run of a sweep: the number that names its folder, and the words of its command."""

    number: int
    words: list[str]
    folder: Path
    process: "subprocess.Popen[bytes] | None" = None  # that computes it now
    num_slots: int = 0  # which it has of the machine
    start_time: float = 0.0

    @property
    def run(self) -> reading.RunFiles:
        """What its folder says now."""
        return reading.read(self.folder)

    @property
    def status(self) -> str:
        """``waiting``, or the status of its run."""
        return self.run.status if self.folder.exists() else "waiting"


class Queue:
    """The jobs of a sweep. A study adds those that it makes up.

    Attributes:
        jobs: all jobs so far.
        waiting: jobs that no driver has looked at.
        num_jobs: how many there will be.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs, self.waiting, self.num_jobs = [*jobs], [*jobs], len(jobs)

    def next(self) -> Job | None:
        """Take a job to start now. One that a killed driver has left may still be saving."""
        for job in [*self.waiting]:
            status = job.status
            if status != "running":
                self.waiting.remove(job)
                if status != "finished":  # one that has failed is tried again
                    return job
                self.ended(job, status)
        return None

    def ended(self, job: Job, status: str) -> None:
        """Take note of how a job has ended."""


@dataclass(frozen=True)
class Needs:
    """What a job computes on, and its words there. 0 GPUs stand for the CPU."""

    words: list[str]
    num_gpus: int = 0
    min_free_gib: float = 0.0


class Driver:
    """Starts jobs while there is room, and reports how they end.

    Args:
        queue: what there is to do.
        program: a command that takes a job's words.
        num_parallel: jobs at a time; ``None`` is one per GPU that a job needs, or one on the CPU.
        needs_of: what the job of some words computes on.
        varied: the keys that differ between the jobs, which the screen shows.
    """

    def __init__(
        self,
        queue: Queue,
        program: Sequence[str],
        num_parallel: int | None,
        needs_of: Callable[[list[str]], Needs],
        varied: Sequence[str] = (),
    ) -> None:
        self.queue, self.program, self.needs_of = queue, program, needs_of
        self.shown = tuple(f"{key}=" for key in varied)
        self.is_counted = num_parallel is not None
        self.num_slots = self.num_free = num_parallel or num_gpus() or 1
        self.running: list[Job] = []
        self.next: Job | None = None  # to start, once there is room
        self.next_look, self.last_message = 0.0, ""
        self.signal = 0  # that asked the sweep to stop

    def run(self) -> int:
        """Run what is left of the sweep, and return the signal that stopped it, or 0."""
        before = {
            number: signal.signal(number, self._on_signal) for number in leaving.ASKED_TO_LEAVE
        }
        try:
            while not self.signal and self._has_more():
                time.sleep(POLL_SECONDS)
            if self.running:
                print(
                    f"{signal.Signals(self.signal).name}: {len(self.running)} running jobs finish "
                    "their step and save. Ctrl-C again leaves at once.",
                    flush=True,
                )
            for job in self.running:
                assert job.process is not None
                job.process.send_signal(self.signal)
            while self.running:
                time.sleep(POLL_SECONDS)
                self._collect()
            return self.signal
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _has_more(self) -> bool:
        """Collect jobs that have ended, start others, and return whether any are left."""
        self._collect()
        while self.num_free and not self.signal and time.monotonic() >= self.next_look:
            self.next = self.next or self.queue.next()
            if self.next is None:
                break
            if self._start(self.next):
                self.next = None
            else:
                self.next_look = time.monotonic() + WAIT_SECONDS
        return bool(self.running or self.next or self.queue.waiting)

    def _start(self, job: Job) -> bool:
        """Start a job with its share of the machine, if there is room.

        It has a session of its own: Ctrl-C in the terminal reaches the driver alone.
        """
        needs = self.needs_of(job.words)
        num_slots = 1 if self.is_counted else min(max(needs.num_gpus, 1), self.num_slots)
        if num_slots > self.num_free:
            return False
        threads = {}
        if num_slots < self.num_slots:  # one that is alone has all cores, as a single run
            cores = max(1, limits.usable_cores() * num_slots // self.num_slots)
            threads = {"OMP_NUM_THREADS": str(cores)}
        job.folder.mkdir(exist_ok=True)
        try:
            with _gpus(needs) as locks, (job.folder / SCREEN).open("ab") as screen:
                job.process = subprocess.Popen(
                    [*self.program, *needs.words],
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=screen,
                    env=threads | launch.job_environment(job.folder),
                    pass_fds=locks,
                    start_new_session=True,
                )
        except UserError as error:
            if not self.running and self.last_message != str(error):
                self.last_message = str(error)
                print(f"Waits for room for job {job.number}. {error}", flush=True)
            return False
        self.num_free -= num_slots
        job.num_slots, job.start_time = num_slots, time.monotonic()
        self.running.append(job)
        words = (word for word in job.words if word.lstrip("+~").startswith(self.shown))
        print(f"job {job.number} starts: {' '.join(words)}", flush=True)
        return True

    def _collect(self) -> None:
        """Take note of jobs that have ended."""
        for job in [*self.running]:
            code = job.process.poll() if job.process else None
            if code is None:
                continue
            self.running.remove(job)
            self.num_free += job.num_slots
            self.next_look = 0.0
            is_cut_off = code < 0 or code - 128 in (*leaving.ASKED_TO_LEAVE, signal.SIGKILL)
            noted = record.read(job.folder)
            # Where another rank was killed, the run ends without having noted a status.
            is_cut_off |= bool(noted.get("starts")) and noted.get("status") is None
            if code and not is_cut_off and job.status != "failed":
                record.note(job.folder, status="failed", reason=f"exit {code}: see {SCREEN}")
            run, seconds = job.run, round(time.monotonic() - job.start_time)
            text = f"job {job.number} {run.status} after {timedelta(seconds=seconds)}"
            if run.status != "finished":
                text += f": {run.facts['reason']}"
            elif run.best is not None:
                text += f", best {run.objective[0]} {run.best:.4g}"
            print(text, flush=True)
            self.queue.ended(job, run.status)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note what asks the sweep to stop; a second Ctrl-C leaves."""
        if self.signal and number == signal.SIGINT:
            os._exit(128 + number)
        self.signal = self.signal or number


@contextmanager
def _gpus(needs: Needs) -> Iterator[list[int]]:
    """Choose GPUs for the process that the block starts, as ``gpus=emptiest`` does.

    Yields the locks of the GPUs. The job inherits them and holds them as long as it lives, also
    where its driver was killed.

    Raises:
        UserError: if there are not enough that are free.
    """
    if not needs.num_gpus:
        yield []
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        chosen = choice.choose_emptiest(needs.num_gpus, needs.min_free_gib)
        yield [choice.locks[gpu.uuid].fileno() for gpu in chosen]
    finally:
        choice.release()  # the job's copy of a lock stays
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
