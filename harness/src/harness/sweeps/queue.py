"""The jobs of a sweep: those of a grid, or those that Optuna suggests. Imports no torch.

In: overrides, and the results in the jobs' folders. Out: the next job to start. Next: ``driver``.
"""

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hydra.core.override_parser.types import IntervalSweep, Override

from harness import provenance
from harness.errors import UserError
from harness.runs import reading
from harness.targets import instantiate

SCREEN = "screen.log"  # the output of a job, in its folder


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


def note_failure(job: Job, reason: str) -> bool:
    """Record that a job has failed, unless its run has begun, which records its own failure.

    Returns whether the failure is new.
    """
    has_begun = bool(provenance.read(job.folder).get("starts"))
    if is_new := not has_begun and job.run["status"] != "failed":
        provenance.note(job.folder, status="failed", reason=reason)
    return is_new


class Queue:
    """The ``jobs`` of a sweep, those ``waiting`` to run, and their total number."""

    done: tuple[str, ...] = ("finished",)  # a failed job runs again

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self.jobs, self.waiting, self.num_jobs = [*jobs], [*jobs], len(jobs)

    def next(self) -> Job | None:
        """Take the next waiting job that is not done."""
        while self.waiting:
            job = self.waiting.pop(0)
            if (run := job.run)["status"] not in self.done:
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

    done = ("finished", "failed")  # in place of a failed trial, the study suggests another one

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
