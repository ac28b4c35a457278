"""Run the jobs of a sweep side by side, each in a process and a folder of its own.

In: a queue of jobs, of a grid or made up by Optuna, and slots. Out: the signal that stopped the
sweep, or 0. Next: ``command.main`` in each process. What is left to do is read from the jobs'
folders, so a driver that was killed loses nothing: its jobs save and end with it, and the next
driver goes on. Imports no torch.
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

from harness import record
from harness.allowed import instantiate
from harness.errors import UserError, print_text
from harness.machine import VISIBLE
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
    def run(self) -> dict[str, Any]:
        """Return the job's state from its folder; a job that has not begun counts as stopped."""
        return reading.read(self.folder)


@dataclass(frozen=True)
class Slot:
    """What one of the jobs that run at a time gets of the machine; ``None`` limits nothing."""

    gpus: str | None = None  # those that CUDA_VISIBLE_DEVICES names
    num_threads: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables of its jobs."""
        values = {VISIBLE: self.gpus, "OMP_NUM_THREADS": self.num_threads}
        return {name: str(value) for name, value in values.items() if value is not None}


class Queue:
    """The ``jobs`` of a sweep, those ``waiting`` for this driver, and how many there will be."""

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self.jobs, self.waiting, self.num_jobs = [*jobs], [*jobs], len(jobs)

    def next(self) -> Job | None:
        """Take a job that has not finished; one that has failed is tried again."""
        while self.waiting:
            job = self.waiting.pop(0)
            if (run := job.run)["status"] != "finished":
                return job
            self.end(job, run)
        return None

    def end(self, job: Job, run: dict[str, Any]) -> None:
        """Take note of how a job has ended; a study does."""


class Study(Queue):
    """The trials of a study of Optuna's as jobs, until there are ``num_trials``, also failed ones.

    A trial is RUNNING in the study until its job has ended, however often the driver or the job is
    killed. A UserError says which of the settings below ``sweep``, or of the words, it refuses.
    """

    def __init__(self, settings: dict[str, Any], mode: str, overrides: Sequence[Override]) -> None:
        super().__init__()
        try:
            import optuna
        except ImportError as error:
            raise UserError("sweep=optuna needs Optuna: pip install -e .[sweep]") from error
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
            setting = "sweep.storage"  # a URL, which may have a password
            self.storage = url and optuna.storages.get_storage(url)
        except UserError:
            raise
        except Exception as error:
            reason = str(error.__cause__ or error).partition("\n")[0]
            raise UserError(f"{setting}: {reason}") from error

    def _distribution(self, override: Override) -> Any:
        """Return the values among which Optuna chooses."""
        value, kinds = override.value(), self.optuna.distributions
        if not isinstance(value, IntervalSweep):
            return kinds.CategoricalDistribution([*override.sweep_string_iterator()])
        ends = value.start, value.end
        is_int = {*map(type, ends)} == {int}
        kind = kinds.IntDistribution if is_int else kinds.FloatDistribution
        return kind(*ends, log="log" in value.tags)

    def open(self, folder: Path) -> Self:
        """Create the study of a sweep's folder, or go on with it."""
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
                f"The study of {folder} has another mode. Start another sweep: resume=null."
            )
        for trial in self.study.get_trials(deepcopy=False):
            is_running = trial.state.name == "RUNNING"
            if trial.params.keys() == self.space.keys():
                self.jobs.append(self._job(trial))
                self.waiting += self.jobs[-1:] if is_running else []
            elif is_running:  # the driver was killed while the sampler chose its values
                self._tell(trial.number, None)
        return self

    def next(self) -> Job | None:
        """Take a job that was cut off, or ask for another trial."""
        job = super().next()
        if job is None and len(self.jobs) < self.num_jobs:
            job = self._job(self.study.ask(self.space))
            self.jobs.append(job)
        return job

    def end(self, job: Job, run: dict[str, Any]) -> None:
        """Tell the study how a trial has ended; one that was cut off goes on later."""
        if run["status"] in ("finished", "failed"):
            value = run["best"] if run["status"] == "finished" else None
            self._tell(job.number, value if value is None or math.isfinite(value) else None)

    def _tell(self, number: int, value: float | None) -> None:
        # A BruteForceSampler that has tried all values stops the study, which has no loop here.
        with suppress(RuntimeError):
            state = self.optuna.trial.TrialState.FAIL if value is None else None
            self.study.tell(number, value, state)

    def _job(self, trial: Any) -> Job:
        words = [f"{key}={value}" for key, value in trial.params.items()]
        return Job(trial.number, [*self.fixed, *words], self.folder / str(trial.number))


def drive(queue: Queue, program: Sequence[str], slots: list[Slot]) -> int:
    """Run what is left of a sweep, and return the signal that stopped it, or 0.

    ``program`` takes a job's words; as many jobs run at a time as there are ``slots``.
    """
    running: dict[subprocess.Popen[bytes], tuple[Job, Slot]] = {}
    asked: list[int] = []  # signals to stop
    is_passed_on = False

    def note_signal(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGINT:  # a second Ctrl-C leaves at once
            os._exit(128 + number)
        asked.append(number)

    before = {number: signal.signal(number, note_signal) for number in leaving.ASKED_TO_LEAVE}
    try:
        # Jobs whose driver was killed may still be saving.
        while not asked and any(job.run["status"] == "running" for job in queue.waiting):
            time.sleep(POLL_SECONDS)
        while True:
            while not asked and slots and (job := queue.next()):
                slot = slots.pop(0)
                running[_start(job, program, slot)] = job, slot
            if not running:
                return asked[0] if asked else 0
            if asked and not is_passed_on:
                num, is_passed_on = f"{signal.Signals(asked[0]).name}: {len(running)}", True
                print(f"{num} jobs finish their step and save. Ctrl-C again leaves at once.")
                for process in running:
                    process.send_signal(asked[0])
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
            [*program, *job.words],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=screen,
            env=parent.job_environment(job.folder) | slot.variables,
            start_new_session=True,  # Ctrl-C in the terminal reaches the driver alone
        )
    print_text(f"job {job.number} starts: {shlex.join(job.words)}")
    return process


def _report(job: Job, code: int) -> dict[str, Any]:
    """Print how a job has ended, and return its run."""
    # A run that has begun notes its own failure; a code above 128 stands for a signal.
    has_begun = bool(record.read(job.folder).get("starts"))
    if 0 < code <= 128 and not has_begun and job.run["status"] != "failed":
        record.note(job.folder, status="failed", reason=f"exit {code}: see {SCREEN}")
    run = job.run
    text = f": {run['reason']}" if run["reason"] else ""
    if run["status"] == "finished" and run["objective"]:
        best = "unknown" if run["best"] is None else f"{run['best']:.5g}"
        text = f", best {run['objective']} {best}"
    print_text(f"job {job.number} {run['status']}{text}")
    return run
