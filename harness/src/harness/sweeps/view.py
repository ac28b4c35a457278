"""A sweep on the screen: a line where a job starts or ends, and a table when all is done."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.places import shown
from harness.runs import tables
from harness.runs.tables import duration
from harness.sweeps.jobs import Job


class View:
    """Prints a line for each event.

    Args:
        varied: the keys that differ between the jobs.
    """

    def __init__(self, varied: Sequence[str]) -> None:
        self.varied = tuple(f"{key}=" for key in varied)
        self.start_times: dict[int, float] = {}

    def say(self, text: str) -> None:
        """Print a line at once, also into a file."""
        print(text, flush=True)

    def started(self, job: Job) -> None:
        """Say that a job starts, or goes on, and what tells it from the others."""
        self.start_times[job.number] = time.monotonic()
        words = (word for word in job.words if word.lstrip("+~").startswith(self.varied))
        self.say(f"job {job.number} starts: {' '.join(words)}")

    def ended(self, job: Job, status: str) -> None:
        """Say how a job has ended, and what it has reached."""
        now = time.monotonic()
        seconds, run = now - self.start_times.pop(job.number, now), job.run
        said = f"job {job.number} {status} after {duration(seconds)}"
        if status != "finished":
            said += f": {run.reason}"
        elif run.best is not None:
            said += f", best {run.objective} {run.best:.4g}"
        self.say(said)


def print_end(folder: Path, jobs: Sequence[Job]) -> None:
    """Print all jobs with what they have reached, and what has become of those that have not."""
    if runs := [job.run for job in jobs if (job.folder / "config.yaml").exists()]:
        tables.print_list(runs)
    for job in jobs:
        if job.folder.exists() and not (job.folder / "config.yaml").exists():
            print(f"{shown(job.folder)}: {job.status}, {job.run.reason}")
    counts = Counter(job.status for job in jobs)
    said = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print(f"sweep folder: {shown(folder)}: {said}")
