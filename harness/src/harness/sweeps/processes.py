"""Run the jobs of a sweep as processes of this machine. Imports no torch.

If the driver is killed, its jobs save and end with it.
"""

import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from harness.devices import VISIBLE
from harness.distributed import parent_process
from harness.sweeps.driver import POLL_SECONDS
from harness.sweeps.queue import SCREEN, Job, note_failure


@dataclass(frozen=True)
class Slot:
    """The GPUs and threads for one running job; ``None`` sets no limit."""

    gpus: str | None = None  # the value of CUDA_VISIBLE_DEVICES
    num_threads: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of the jobs in this slot."""
        values = {VISIBLE: self.gpus, "OMP_NUM_THREADS": self.num_threads}
        return {name: str(value) for name, value in values.items() if value is not None}


class Processes:
    """The processes of a sweep's jobs.

    Args:
        program: the command to which a job's overrides are appended.
        slots: one for each job that may run at the same time.
    """

    def __init__(self, program: Sequence[str], slots: Sequence[Slot]) -> None:
        self.program, self.slots, self.num_parallel = program, [*slots], len(slots)
        self.running: dict[subprocess.Popen[bytes], tuple[Job, Slot]] = {}
        self.is_stopping = False

    def has(self, job: Job) -> bool:
        """Return false: the processes of a driver end with it."""
        return False

    def start(self, job: Job) -> str:
        """Start a job, and return a text; the job of a killed driver may still be saving."""
        while job.run["status"] == "running":
            time.sleep(POLL_SECONDS)
        slot = self.slots.pop(0)
        job.folder.mkdir(exist_ok=True)
        with (job.folder / SCREEN).open("ab") as screen:
            process = subprocess.Popen(
                [*self.program, *job.overrides],
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                env=parent_process.job_environment(job.folder) | slot.variables,
                start_new_session=True,  # so Ctrl-C in the terminal reaches only the driver
            )
        self.running[process] = job, slot
        return "starts"

    def poll(self) -> list[Job]:
        """Return the jobs that have ended since the last call."""
        jobs = []
        for process in [process for process in self.running if process.poll() is not None]:
            job, slot = self.running.pop(process)
            self.slots.append(slot)
            if 0 < process.returncode <= 128:  # above 128, a signal has ended the job
                note_failure(job, f"exit {process.returncode}: see {SCREEN}")
            jobs.append(job)
        return jobs

    def stop(self, signum: int) -> bool:
        """Pass a signal on to the jobs once, which then save and end."""
        if not self.is_stopping:
            text = f"{signal.Signals(signum).name}: the running jobs finish their step and save."
            print(f"{text} Press Ctrl-C again to exit at once.")
            for process in self.running:
                process.send_signal(signum)
        self.is_stopping = True
        return True
