"""A sweep whose settings Optuna makes up, by asking and telling. No torch.

A trial is the job of its number: it is RUNNING in the study until its job has ended, however often
the driver or the job was killed meanwhile. The study and the jobs' folders are all that is known.
"""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from harness.allowed import instantiate
from harness.errors import UserError
from harness.sweeps.jobs import ENDED, Job, Jobs


def opened(folder: Path, name: str, mode: str, settings: dict[str, Any]) -> Any:
    """The study of a sweep, which is made where there is none: ``study.db`` in the sweep's folder.

    Args:
        folder: of the sweep.
        name: of the study.
        mode: ``min`` or ``max``.
        settings: conf/sweep/optuna.yaml.

    Raises:
        UserError: if it cannot be opened, or seeks another optimum.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError("sweep=optuna needs Optuna: pip install -e .[sweep]") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    try:
        sampler = instantiate(settings["sampler"])
    except UserError:
        raise  # it is not allowed
    except Exception as error:  # what it does not take, or that it does not exist
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(
            f"sweep.sampler={settings['sampler'].get('_target_')}: {reason}\n"
            "Leave out a setting of another sampler with ~sweep.sampler.<setting>."
        ) from error
    path = folder / "study.db"
    direction: Any = {"min": "minimize", "max": "maximize"}[mode]
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path}",
            study_name=name,
            direction=direction,
            load_if_exists=True,
            sampler=sampler,
        )
    except Exception as error:  # of SQLite, or of what Optuna reads it with
        said = str(error).partition("\n")[0]
        raise UserError(f"{path}: the study cannot be opened: {said}") from error
    if study.direction.name.lower() != direction:
        raise UserError(
            f"The study in {path} does not seek mode={mode}.\n"
            "Use the mode that it was started with, or start another sweep."
        )
    return study


def distribution(override: Override) -> Any:
    """Among which values Optuna chooses, for a word that names several.

    Raises:
        UserError: for a word that Optuna cannot take.
    """
    from optuna import distributions

    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            low: Any = value.start
            high: Any = value.end
            is_log = "log" in value.tags
            if isinstance(low, int) and isinstance(high, int):
                return distributions.IntDistribution(low, high, log=is_log)
            return distributions.FloatDistribution(low, high, log=is_log)
        if isinstance(value, RangeSweep) and not value.shuffle:
            numbers: list[Any] = list(value.range())
            is_whole = all(isinstance(number, int) for number in numbers)
            kind: Any = (
                distributions.IntDistribution if is_whole else distributions.FloatDistribution
            )
            high = max(numbers) if is_whole else round(max(numbers), 12)  # 0.7000000000000001
            return kind(min(numbers), high, step=abs(value.step))
        if isinstance(value, (ChoiceSweep, RangeSweep)) or override.is_discrete_sweep():
            return distributions.CategoricalDistribution([*override.sweep_string_iterator()])
    except (TypeError, ValueError) as error:
        raise UserError(f"{override.input_line}: {error}") from error
    raise UserError(f"{override.input_line} is nothing that Optuna can choose from.")


class Study(Jobs):
    """The jobs of a study, each with a folder in that of the sweep.

    Args:
        study: of Optuna.
        folder: of the sweep.
        overrides: the words, of which some name several values.
        num_trials: jobs in all.
        objective: whose best value a job is judged by.
    """

    def __init__(
        self,
        study: Any,
        folder: Path,
        overrides: Sequence[Override],
        num_trials: int,
        objective: str,
    ) -> None:
        from optuna.trial import TrialState

        super().__init__([])
        self.study, self.folder, self.states = study, folder, TrialState
        self.objective, self.num_jobs = objective, num_trials
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        varied = [override for override in overrides if override.is_sweep_override()]
        self.space = {override.get_key_element(): distribution(override) for override in varied}
        for trial in study.get_trials(deepcopy=False):
            job, is_running = self._job(trial), trial.state == TrialState.RUNNING
            if job.folder.is_dir():
                self.known.append(job)
                self.pending += [job] if is_running else []
            elif is_running:  # the driver was killed while the sampler chose its values
                study.tell(trial.number, state=TrialState.FAIL)

    def made_up(self) -> Job | None:
        """Ask for another trial, if there are not enough."""
        if len(self.known) >= self.num_jobs:
            return None
        number = self.study.ask(self.space).number
        job = self._job(self.study.get_trials(deepcopy=False)[number])
        job.folder.mkdir()  # from here on it counts
        self.known.append(job)
        return job

    def ended(self, job: Job, status: str) -> None:
        """Tell the study how a trial has ended; one that was cut off goes on as it is.

        Raises:
            UserError: if the objective is not logged.
        """
        value = job.run.best if status == "finished" else None
        if status == "finished" and value is None:
            raise UserError(
                f"objective={self.objective} is not among what {job.folder} has logged: "
                f"{', '.join(job.run.metrics)}.\nUse one of these with objective= and mode=."
            )
        if value is not None and math.isfinite(value):
            self.study.tell(job.number, value, skip_if_finished=True)
        elif status in ENDED:
            self.study.tell(job.number, state=self.states.FAIL, skip_if_finished=True)

    def _job(self, trial: Any) -> Job:
        words = [f"{key}={value}" for key, value in trial.params.items()]
        return Job(trial.number, [*self.fixed, *words], self.folder / str(trial.number))
