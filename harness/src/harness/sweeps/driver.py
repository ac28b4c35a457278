"""Run the jobs of a sweep in parallel, each in its own folder. Imports no torch.

In: a queue of jobs, of a grid or suggested by Optuna, and the place where they run. Out: the signal
that stopped the sweep, or 0. Next: ``command.main`` in each job. The driver is the process of the
sweep. After it was killed, the next one reads from the jobs' folders what is left to do.
"""

import os
import shlex
import signal
import time
from types import FrameType
from typing import Any, Protocol

from harness.checkpoints.lookup import by_step
from harness.distributed import shutdown
from harness.errors import UserError, print_text
from harness.sweeps.queue import Job, Queue

POLL_SECONDS = 0.1


class Place(Protocol):
    """The place where jobs run: processes of this machine, or a cluster.

    Attributes:
        num_parallel: how many jobs may run at the same time.
    """

    num_parallel: int

    def has(self, job: Job) -> bool:
        """Return whether a job of an earlier driver runs here."""

    def start(self, job: Job) -> str | None:
        """Start a job, and return how, as a text; ``None`` if the driver must try again.

        Raises:
            UserError: the place refuses the job.
        """

    def poll(self) -> list[Job]:
        """Return the jobs that have ended since the last call; their folders have the results."""

    def stop(self, signum: int) -> bool:
        """Handle a signal that stops the driver; return whether the jobs end, too."""


def run_jobs(queue: Queue, place: Place, wait: bool = True) -> tuple[int, list[Job]]:
    """Run the remaining jobs of a sweep.

    Args:
        queue: the jobs.
        place: where they run.
        wait: whether to wait for the jobs that run; otherwise no more than these start.

    Returns:
        The signal that stopped the sweep, or 0, and the jobs that continue without the driver.
    """
    running: list[Job] = []
    received: list[int] = []  # signals that stop the sweep
    is_full = False  # whether the place has refused a job since the last one ended

    def note_signal(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:  # a second Ctrl-C exits at once
            os._exit(128 + number)
        received.append(number)

    before = {number: signal.signal(number, note_signal) for number in shutdown.EXIT_SIGNALS}
    try:
        # First take up jobs that run already: if the place is full, it would refuse others.
        queue.waiting.sort(key=lambda job: not place.has(job))
        while True:
            may_start = not received and not is_full and len(running) < place.num_parallel
            if may_start and (job := queue.next()):
                try:
                    if text := place.start(job):
                        if saved := by_step(job.folder / "checkpoints"):
                            text += f", {saved[-1].stem} is saved"
                        print_text(f"job {job.number} {text}: {shlex.join(job.overrides)}")
                        running.append(job)
                    else:
                        queue.waiting.insert(0, job)
                        time.sleep(POLL_SECONDS)
                except UserError as error:
                    queue.waiting.insert(0, job)
                    if not running:
                        raise
                    is_full = True
                    print_text(f"{error}\nThe sweep tries again when another job has ended.")
            elif not running or not wait or (received and not place.stop(received[0])):
                return (received[0] if received else 0), running
            else:
                time.sleep(POLL_SECONDS)
            for job in place.poll():
                running.remove(job)
                is_full = False
                queue.end(job, _report(job))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(job: Job) -> dict[str, Any]:
    """Print how a job has ended, and return its state."""
    run = job.run
    text = f": {run['reason']}" if run["reason"] else ""
    if run["status"] == "finished" and run["objective"]:
        best = "unknown" if run["best"] is None else f"{run['best']:.5g}"
        text = f", best {run['objective']} {best}"
    print_text(f"job {job.number} {run['status']}{text}")
    return run
