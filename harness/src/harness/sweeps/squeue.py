"""List the Slurm jobs of a sweep by squeue. Imports no torch.

In: the name of the sweep's Slurm jobs, whose comments are the numbers of the sweep's jobs. Out: the
id and the state of each. Next: ``slurm``.
"""

import re
import subprocess
import time
from collections.abc import Sequence

from harness.errors import UserError, print_text

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "OUT_OF_MEMORY", "REVOKED", "GONE"),  # GONE: squeue does not know the job
)
BEGUN = ("RUNNING", "COMPLETING")  # a job that is put back has these states before PENDING
USUAL = ("", "None", "(null)", "Priority", "Resources", "BeginTime", "Cleaning")  # reasons to wait


class SlurmList:
    """The id and the state of each Slurm job of a sweep.

    Args:
        name: of the Slurm jobs.
        poll_seconds: between two calls of squeue.
    """

    def __init__(self, name: str, poll_seconds: float) -> None:
        self.name, self.poll_seconds = name, poll_seconds
        self.jobs: dict[int, tuple[str, str]] = {}  # by the numbers of the sweep's jobs
        self.time = -1.0  # of the last call that squeue has answered
        self.next_time = -1.0
        self.printed: dict[int, str] = {}  # by number: the last printed reason to wait
        self.is_silent = False  # whether squeue did not answer last time

    def find(self, number: int) -> tuple[str, str]:
        """Return the id and the state of a job's Slurm job."""
        return self.jobs.get(number, ("", "GONE"))

    def update(self) -> bool:
        """Call squeue, unless the last call was less than ``poll_seconds`` ago.

        Returns:
            Whether the last call was answered.

        Raises:
            UserError: squeue has never answered.
        """
        begin = time.monotonic()
        if begin < self.next_time:
            return not self.is_silent
        command = ["squeue", "--me", f"--name={self.name}", "--states=all", "--noheader"]
        answer = subprocess.run(
            [*command, "--format=%k %i %T %r"],
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        self.next_time = time.monotonic() + self.poll_seconds
        was_silent, self.is_silent = self.is_silent, answer.returncode != 0
        if self.is_silent:
            text = f"squeue does not answer: {answer.stderr.strip()}"
            if self.time < 0:
                raise UserError(text)
            if not was_silent:
                print_text(f"{text}\nThe sweep waits for Slurm.")
            return False
        rows = re.findall(r"^(\d+) (\d+) ([A-Z_]+) ?(.*)$", answer.stdout, re.MULTILINE)
        # If a number has several Slurm jobs, the last one counts that has not ended.
        rows.sort(key=lambda row: (row[2] not in ENDED, int(row[1])))
        self._report(rows)
        self.jobs = {int(number): (slurm_job, state) for number, slurm_job, state, _ in rows}
        self.time = begin
        return True

    def _report(self, rows: Sequence[tuple[str, str, str, str]]) -> None:
        """Print which jobs Slurm has put back into its queue, and unusual reasons to wait."""
        for text, slurm_job, state, reason in rows:
            number = int(text)
            last_job, last_state = self.find(number)
            if state == "PENDING" and slurm_job == last_job and last_state in BEGUN:
                print_text(f"job {number} was put back into Slurm's queue")
            if state == "PENDING" and reason not in (*USUAL, self.printed.get(number)):
                print_text(f"job {number} waits in Slurm's queue: {reason}")
                self.printed[number] = reason
