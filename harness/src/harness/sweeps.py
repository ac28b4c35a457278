"""Run the jobs of a sweep in parallel, each in its own process and folder. Imports no torch.

In: a queue of jobs, from a grid or from Optuna, and slots for them. Out: the signal that stopped
the sweep, or 0. Next: ``command.main`` in each process. If the driver (the process of the sweep) is
killed, its jobs save and end with it. The next driver reads the jobs' folders, and runs the jobs
that have not finished.
"""

import math
import os
import shlex
import signal
import subprocess
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from hydra.core.override_parser.types import IntervalSweep, Override

from harness import provenance
from harness.devices import VISIBLE
from harness.distributed import parent_process, shutdown
from harness.errors import UserError, print_text
from harness.runs import reading
from harness.targets import instantiate

SCREEN = "screen.log"  # the output of a job's process, in the job's folder
POLL_SECONDS = 0.1


@dataclass
class Job:
    """One run of a sweep: its number, the overrides of its command, and its folder."""

    number: int
    overrides: list[str]
    folder: Path

    @property
    def run(self) -> dict[str, Any]:
        """Return the job's state from its folder; before its start, the status is "stopped"."""
        return reading.read(self.folder)


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


class Queue:
    """The ``jobs`` of a sweep, those ``waiting`` to run, and their total number."""

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self.jobs, self.waiting, self.num_jobs = [*jobs], [*jobs], len(jobs)

    def next(self) -> Job | None:
        """Take the next waiting job that has not finished; a failed job runs again."""
        while self.waiting:
            job = self.waiting.pop(0)
            if (run := job.run)["status"] != "finished":
                return job
            self.end(job, run)
        return None

    def end(self, job: Job, run: dict[str, Any]) -> None:
        """Handle the end of a job; a study stores its result."""


class Study(Queue):
    """The trials of an Optuna study as jobs, until there are ``num_trials``, failed ones included.

    A trial stays RUNNING in the study until its job has ended, even if the driver or the job is
    killed in between.

    Raises:
        UserError: if an override, or a setting below ``sweep``, is invalid.
    """

    def __init__(self, settings: dict[str, Any], mode: str, overrides: Sequence[Override]) -> None:
        super().__init__()
        try:
            import optuna
        except ImportError as error:
            raise UserError("sweep=optuna needs Optuna: pip install -e '.[sweep]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self.optuna: Any = optuna
        self.direction = "minimize" if mode == "min" else "maximize"
        self.num_jobs, url = settings["num_trials"], settings["storage"]
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        self.space: dict[str, Any] = {}
        setting = ""
        try:
            for override in filter(Override.is_sweep_override, overrides):
                setting = str(override.input_line)
                self.space[override.get_key_element()] = self._distribution(override)
            setting = f"sweep.sampler={settings['sampler'].get('_target_')}"
            self.sampler = instantiate(settings["sampler"])
            setting = "sweep.storage"  # without its URL, which may have a password
            self.storage = url and optuna.storages.get_storage(url)
        except UserError:
            raise
        except Exception as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise UserError(f"{setting}: {reason}") from error

    def _distribution(self, override: Override) -> Any:
        """Return the distribution from which Optuna suggests the values of an override."""
        value, kinds = override.value(), self.optuna.distributions
        if not isinstance(value, IntervalSweep):
            return kinds.CategoricalDistribution([*override.sweep_string_iterator()])
        ends = value.start, value.end
        is_int = {*map(type, ends)} == {int}
        kind = kinds.IntDistribution if is_int else kinds.FloatDistribution
        return kind(*ends, log="log" in value.tags)

    def open(self, folder: Path) -> Self:
        """Create the study of a sweep's folder, or resume it."""
        name, self.folder = folder.parent.name, folder
        self.study = self.optuna.create_study(
            storage=self.storage or f"sqlite:///{folder / 'study.db'}",
            study_name=f"{name}/{folder.name}" if self.storage else name,
            direction=self.direction,
            sampler=self.sampler,
            load_if_exists=True,
        )
        if self.study.direction.name.lower() != self.direction:
            raise UserError(
                f"The study in {folder} has another direction than {self.direction}.\n"
                "Start a new sweep: resume=null."
            )
        for trial in self.study.get_trials(deepcopy=False):
            is_running = trial.state.name == "RUNNING"
            if trial.params.keys() == self.space.keys():
                self.jobs.append(self._job(trial))
                self.waiting += self.jobs[-1:] if is_running else []
            elif is_running:  # the driver was killed before the sampler had suggested all values
                self._tell(trial.number, None)
        return self

    def next(self) -> Job | None:
        """Take a job that was interrupted, or ask the study for a new trial."""
        job = super().next()
        if job is None and len(self.jobs) < self.num_jobs:
            job = self._job(self.study.ask(self.space))
            self.jobs.append(job)
        return job

    def end(self, job: Job, run: dict[str, Any]) -> None:
        """Store the result of a trial in the study; an interrupted trial resumes later."""
        if run["status"] in ("finished", "failed"):
            value = run["best"] if run["status"] == "finished" else None
            self._tell(job.number, value if value is None or math.isfinite(value) else None)

    def _tell(self, number: int, value: float | None) -> None:
        # At its end BruteForceSampler calls study.stop(), which raises outside of study.optimize().
        with suppress(RuntimeError):
            state = self.optuna.trial.TrialState.FAIL if value is None else None
            self.study.tell(number, value, state)

    def _job(self, trial: Any) -> Job:
        suggested = [f"{key}={value}" for key, value in trial.params.items()]
        return Job(trial.number, [*self.fixed, *suggested], self.folder / str(trial.number))


def run_jobs(queue: Queue, program: Sequence[str], slots: list[Slot]) -> int:
    """Run the remaining jobs of a sweep, and return the signal that stopped it, or 0.

    Args:
        queue: the jobs.
        program: the command to which a job's overrides are appended.
        slots: one for each job that may run at the same time.
    """
    running: dict[subprocess.Popen[bytes], tuple[Job, Slot]] = {}
    received: list[int] = []  # signals that stop the sweep
    is_forwarded = False

    def note_signal(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:  # a second Ctrl-C exits at once
            os._exit(128 + number)
        received.append(number)

    before = {number: signal.signal(number, note_signal) for number in shutdown.EXIT_SIGNALS}
    try:
        # The jobs of a killed driver may still be saving.
        while not received and any(job.run["status"] == "running" for job in queue.waiting):
            time.sleep(POLL_SECONDS)
        while True:
            while not received and slots and (job := queue.next()):
                slot = slots.pop(0)
                running[_start(job, program, slot)] = job, slot
            if not running:
                return received[0] if received else 0
            if received and not is_forwarded:
                is_forwarded, name = True, signal.Signals(received[0]).name
                text = f"{name}: the running jobs finish their step and save."
                print(f"{text} Press Ctrl-C again to exit at once.")
                for process in running:
                    process.send_signal(received[0])
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                job, slot = running.pop(process)
                slots.append(slot)
                queue.end(job, _report(job, process.returncode))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(job: Job, program: Sequence[str], slot: Slot) -> "subprocess.Popen[bytes]":
    job.folder.mkdir(exist_ok=True)
    with (job.folder / SCREEN).open("ab") as screen:
        process = subprocess.Popen(
            [*program, *job.overrides],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            env=parent_process.job_environment(job.folder) | slot.variables,
            start_new_session=True,  # so Ctrl-C in the terminal reaches only the driver
        )
    print_text(f"job {job.number} starts: {shlex.join(job.overrides)}")
    return process


def _report(job: Job, code: int) -> dict[str, Any]:
    """Print how a job has ended, and return its state."""
    # A run that has begun records its own failure. An exit status above 128 means a signal.
    has_begun = bool(provenance.read(job.folder).get("starts"))
    if 0 < code <= 128 and not has_begun and job.run["status"] != "failed":
        provenance.note(job.folder, status="failed", reason=f"exit {code}: see {SCREEN}")
    run = job.run
    text = f": {run['reason']}" if run["reason"] else ""
    if run["status"] == "finished" and run["objective"]:
        best = "unknown" if run["best"] is None else f"{run['best']:.5g}"
        text = f", best {run['objective']} {best}"
    print_text(f"job {job.number} {run['status']}{text}")
    return run
