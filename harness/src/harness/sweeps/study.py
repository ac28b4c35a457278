"""Let Optuna make up the jobs of a sweep, by asking and telling.

In: words, of which some name several values. Out: a queue whose jobs are the study's trials.
A trial is RUNNING in the study until its job has ended, however often the driver or the job was
killed. The study (``study.db``) and the jobs' folders are all that is known. Imports no torch.
"""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from harness.allowed import instantiate
from harness.errors import UserError
from harness.sweeps.driver import Job, Queue


def space_of(overrides: Sequence[Override]) -> dict[str, Any]:
    """Return the distribution of each key for which several values were typed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError("sweep=optuna needs Optuna: pip install -e .[sweep]") from error
    space = {}
    for override in overrides:
        if override.is_sweep_override():
            try:
                space[override.get_key_element()] = distribution(override)
            except (TypeError, ValueError) as error:
                raise UserError(f"{override.input_line}: {error}") from error
    return space


def distribution(override: Override) -> Any:
    """Return the values among which Optuna chooses; a ValueError if it cannot."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        low, high = value.start, value.end
        is_whole = isinstance(low, int) and isinstance(high, int)
        kind: Any = IntDistribution if is_whole else FloatDistribution
        return kind(low, high, log="log" in value.tags)
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers: list[Any] = list(value.range())
        if all(isinstance(number, int) for number in numbers):
            return IntDistribution(min(numbers), max(numbers), step=abs(int(value.step)))
        high = round(max(numbers), 12)  # 0.7000000000000001
        return FloatDistribution(min(numbers), high, step=abs(value.step))
    return CategoricalDistribution([*override.sweep_string_iterator()])


def sampler_of(settings: dict[str, Any]) -> Any:
    """Build Optuna's sampler; a UserError if it does not exist, or does not take its settings."""
    import optuna

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    try:
        return instantiate(settings)
    except UserError:
        raise
    except Exception as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(
            f"sweep.sampler={settings.get('_target_')}: {reason}\n"
            "Leave out a setting of another sampler with ~sweep.sampler.<setting>."
        ) from error


def open_study(folder: Path, name: str, mode: str, sampler: Any = None) -> Any:
    """Open the study of a sweep, or make it; a UserError if it seeks another optimum."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path, direction = folder / "study.db", {"min": "minimize", "max": "maximize"}[mode]
    options: Any = {"study_name": name, "direction": direction, "load_if_exists": True}
    study = optuna.create_study(storage=f"sqlite:///{path}", sampler=sampler, **options)
    if study.direction.name.lower() != direction:
        raise UserError(
            f"The study in {path} does not seek mode={mode}.\n"
            "Use the mode that it was started with, or start another sweep."
        )
    return study


class Study(Queue):
    """The trials of Optuna's study as jobs, up to a number of them."""

    def __init__(
        self, study: Any, folder: Path, overrides: Sequence[Override], num_trials: int
    ) -> None:
        from optuna.trial import TrialState

        super().__init__([])
        self.study, self.folder, self.failed = study, folder, TrialState.FAIL
        self.num_jobs, self.space = num_trials, space_of(overrides)
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        for trial in study.get_trials(deepcopy=False):
            job, is_running = self._job(trial), trial.state == TrialState.RUNNING
            if job.folder.is_dir():
                self.jobs.append(job)
                self.waiting += [job] if is_running else []
            elif is_running:  # the driver was killed while the sampler chose its values
                study.tell(trial.number, state=self.failed)

    def next(self) -> Job | None:
        """Take a job that was cut off, or ask for another trial, if there are not enough."""
        if (job := super().next()) or len(self.jobs) >= self.num_jobs:
            return job
        number = self.study.ask(self.space).number
        job = self._job(self.study.get_trials(deepcopy=False)[number])
        job.folder.mkdir()  # from here on it counts
        self.jobs.append(job)
        return job

    def ended(self, job: Job, status: str) -> None:
        """Tell the study how a trial has ended; one that was cut off goes on as it is.

        Raises:
            UserError: if the objective is not logged.
        """
        run = job.run
        if status == "finished" and run.best is None:
            raise UserError(
                f"objective={run.objective[0]} is not among what {job.folder} has logged: "
                f"{', '.join(run.metrics)}.\nUse one of these with objective= and mode=."
            )
        if status == "finished" and math.isfinite(run.best or 0.0):
            self.study.tell(job.number, run.best, skip_if_finished=True)
        elif status in ("finished", "failed"):
            self.study.tell(job.number, state=self.failed, skip_if_finished=True)

    def _job(self, trial: Any) -> Job:
        words = [f"{key}={value}" for key, value in trial.params.items()]
        return Job(trial.number, [*self.fixed, *words], self.folder / str(trial.number))
