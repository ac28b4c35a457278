"""The jobs of a sweep, each with a folder of its own, which says what has become of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import record
from harness.runs import reading
from harness.runs.reading import RunFiles

SCREEN = "screen.log"  # what a job has shown
ENDED = ("finished", "failed", "pruned")


@dataclass
class Job:
    """One run of a sweep.

    Attributes:
        number: names the folder.
        words: of its command.
        folder: of the run.
        trial: its number in an Optuna study.
    """

    number: int
    words: list[str]
    folder: Path
    trial: int | None = None

    @property
    def status(self) -> str:
        """``waiting``, ``running``, ``finished``, ``failed``, ``pruned``, or ``stopped``."""
        if reading.is_locked(self.folder / ".lock"):
            return "running"
        if (self.folder / reading.RESULTS).is_file():
            return "finished"
        noted = record.read(self.folder).get("status")
        if noted in ENDED[1:]:
            return str(noted)
        return "stopped" if (self.folder / SCREEN).exists() else "waiting"

    @property
    def run(self) -> RunFiles:
        """What its folder says of it; a job that was refused has no config."""
        found = reading.read(self.folder)
        if not (self.folder / reading.CONFIG).exists():
            found.damage = ""
        return found

    def forget_failure(self) -> None:
        """Let a failed job be tried again."""
        if self.status == "failed":
            record.note(self.folder, status=None, reason=None)


class Jobs:
    """The jobs of a grid; a study adds those that it makes up.

    Attributes:
        known: all jobs so far.
        pending: those that have not ended, and wait for their turn.
        num_jobs: how many there will be.
    """

    def __init__(self, known: Iterable[Job], retries_failed: bool) -> None:
        self.known = list(known)
        if retries_failed:
            for job in self.known:
                job.forget_failure()
        self.pending = [job for job in self.known if job.status not in ENDED]
        self.num_jobs = len(self.known)

    def next(self) -> Job | None:
        """A job to start now; ``None`` if there is none.

        What a driver that was killed has left is perhaps still saving, and is waited for.
        """
        for job in list(self.pending):
            status = job.status
            if status == "running":
                continue
            self.pending.remove(job)
            if status not in ENDED:
                return job
            self.ended(job, status)
        return self.made_up()

    def made_up(self) -> Job | None:
        """A job that nobody has typed."""
        return None

    def ended(self, job: Job, status: str) -> None:
        """Take note of what has become of a job."""

    def settle(self) -> None:
        """Bring the folders up to date, when all has ended."""

    def is_hopeless(self, job: Job) -> str:
        """Why a running job is to be stopped for good; empty if it is not."""
        return ""


def grid(folder: Path, jobs: Sequence[Sequence[str]], retries_failed: bool) -> Jobs:
    """Every combination that was typed, numbered in Hydra's order."""
    known = [Job(number, [*words], folder / str(number)) for number, words in enumerate(jobs)]
    return Jobs(known, retries_failed)
