"""A sweep in the terminal: what runs, what has ended, what is best, and how long it will take."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from harness.places import shown
from harness.runs import tables
from harness.runs.reading import RunFiles
from harness.runs.tables import COLOURS, duration
from harness.sweeps.jobs import ENDED, Job, Jobs

MOST_WORDS = 60  # characters of a job's words


class View:
    """A picture that moves where there is a terminal, and else a line for each event.

    Args:
        varied: the keys that differ between the jobs.
        num_parallel: jobs at a time, of which the time that is left depends.
    """

    def __init__(self, varied: Sequence[str], num_parallel: int) -> None:
        self.varied, self.num_parallel = tuple(f"{key}=" for key in varied), num_parallel
        self.live = Live(auto_refresh=False) if sys.stdout.isatty() else None
        self.started_times: dict[int, float] = {}
        self.seconds: list[float] = []  # of jobs that have ended here
        self.scores: dict[int, tuple[str, float, bool]] = {}  # of finished jobs

    def __enter__(self) -> "View":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the terminal be as it was."""
        if self.live:
            self.live.update("", refresh=True)
            self.live.stop()

    def say(self, text: str) -> None:
        """A line, above the picture."""
        console = self.live.console if self.live else Console(highlight=False, soft_wrap=True)
        console.print(escape(text), highlight=False)
        sys.stdout.flush()

    def started(self, job: Job) -> None:
        """Say that a job starts, or goes on."""
        self.started_times[job.number] = time.monotonic()
        if not self.live:
            self.say(f"job {job.number} starts: {self.words(job, 1000)}")

    def ended(self, job: Job, status: str) -> None:
        """Say how a job has ended."""
        seconds = time.monotonic() - self.started_times.pop(job.number, time.monotonic())
        self.seconds.append(seconds)
        if status == "finished" and self.live:
            return
        run = job.run
        reached = "" if run.best is None else f", best {run.objective} {run.best:.4g}"
        why = f": {run.reason}" if status != "finished" else reached
        self.say(f"job {job.number} {status} after {duration(seconds)}{why}")

    def words(self, job: Job, most: int = MOST_WORDS) -> str:
        """What tells a job from the others."""
        words = " ".join(word for word in job.words if word.lstrip("+~").startswith(self.varied))
        return words if len(words) <= most else f"{words[:most]}…"

    def show(self, running: Sequence[Job], jobs: Jobs) -> None:
        """Draw the sweep as it is now."""
        if not self.live:
            return
        table = Table(box=None, pad_edge=False)
        for name in ("running", "settings", "epoch", "step", "now", "best", "time"):
            table.add_column(name, justify="left" if name in ("running", "settings") else "right")
        for job in running:
            table.add_row(*map(escape, self._row(job)))
        ended = [job for job in jobs.known if job not in running]
        counts = Counter(job.status for job in ended)
        parts = [f"[{COLOURS.get(s, 'yellow')}]{n} {s}[/]" for s, n in sorted(counts.items())]
        left = jobs.num_jobs - sum(counts[status] for status in ENDED)
        if self.seconds:
            mean, now = sum(self.seconds) / len(self.seconds), time.monotonic()
            done = sum(min(now - start, mean) for start in self.started_times.values())
            parts.append(f"about {duration((left * mean - done) / self.num_parallel)} left")
        if best := self.best(ended):
            parts.append(escape(best))
        self.live.update(
            Group(table, f"{jobs.num_jobs} jobs: {', '.join(parts) or 'the first run'}"),
            refresh=True,
        )

    def _row(self, job: Job) -> list[str]:
        run: RunFiles = job.run
        points = run.curves.get(run.objective or "", [])
        step = max((points[-1][0] for points in run.curves.values() if points), default=None)
        epochs = run.curves.get("epoch")
        seconds = time.monotonic() - self.started_times.get(job.number, time.monotonic())
        epoch = int(epochs[-1][1]) if epochs else None
        values: list[Any] = [epoch, step, points[-1][1] if points else None, run.best]
        texts = [tables.text("", value) for value in values]
        return [f"{job.number}", self.words(job), *texts, duration(seconds)]

    def best(self, jobs: Sequence[Job]) -> str:
        """The best of the finished jobs, in words."""
        for job in jobs:
            if job.number not in self.scores and job.status == "finished":
                run = job.run
                if run.best is not None:
                    is_max = run.config.get("mode") == "max"
                    self.scores[job.number] = (str(run.objective), run.best, is_max)
        if not self.scores:
            return ""
        number, (name, score, _) = min(
            self.scores.items(), key=lambda item: item[1][1] * (-1 if item[1][2] else 1)
        )
        return f"best so far: job {number} with {name} {score:.4g}"


def print_end(folder: Path, jobs: Sequence[Job], best: str) -> None:
    """Print all jobs with what they have reached, and what has become of those that have not."""
    runs = [job.run for job in jobs if (job.folder / "config.yaml").exists()]
    if runs:
        tables.print_list(runs)
    for job in jobs:
        if job.folder.exists() and not (job.folder / "config.yaml").exists():
            print(f"{shown(job.folder)}: {job.status}, {job.run.reason}")
    counts = Counter(job.status for job in jobs)
    said = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    print(f"sweep folder: {shown(folder)}: {said}. {best}".rstrip())
