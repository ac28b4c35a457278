"""The jobs of a sweep, each with a folder of its own, which says what has become of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import record
from harness.runs import reading
from harness.runs.reading import RunFiles

SCREEN = "screen.log"  # what a job has shown
ENDED = ("finished", "failed")


@dataclass
class Job:
    """One run of a sweep.

    Attributes:
        number: names the folder.
        words: of its command.
        folder: of the run.
    """

    number: int
    words: list[str]
    folder: Path

    @property
    def status(self) -> str:
        """``waiting``, ``running``, ``finished``, ``failed``, or ``stopped``."""
        if reading.is_locked(self.folder / ".lock"):
            return "running"
        if (self.folder / reading.RESULTS).is_file():
            return "finished"
        if record.read(self.folder).get("status") == "failed":
            return "failed"
        return "stopped" if (self.folder / SCREEN).exists() else "waiting"

    @property
    def run(self) -> RunFiles:
        """What its folder says of it; a job that was refused has no config."""
        found = reading.read(self.folder)
        if not (self.folder / reading.CONFIG).exists():
            found.damage = ""
        return found


class Jobs:
    """The jobs of a grid; a study adds those that it makes up.

    Attributes:
        known: all jobs so far.
        pending: those that wait for their turn.
        num_jobs: how many there will be.
    """

    def __init__(self, known: Iterable[Job]) -> None:
        self.known = list(known)
        self.pending = list(self.known)
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


def grid(folder: Path, jobs: Sequence[Sequence[str]], retries_failed: bool) -> Jobs:
    """Every combination that was typed, numbered in Hydra's order."""
    known = [Job(number, [*words], folder / str(number)) for number, words in enumerate(jobs)]
    for job in known:
        if retries_failed and job.status == "failed":
            record.note(job.folder, status=None, reason=None)
    return Jobs(known)
