"""A sweep whose settings Optuna makes up, by asking and telling. No torch.

A trial is a job: it is RUNNING in the study until its job has ended, however often the driver or
the job was killed meanwhile. The study and the jobs' folders are all that is known of a sweep, and
several drivers may share a study: each goes on with the trials whose folders it has.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from harness import record
from harness.allowed import instantiate
from harness.errors import UserError
from harness.sweeps.jobs import ENDED, Job, Jobs
from harness.upstream.trials import running_trial

JOB = "job"  # the attribute of a trial that has a folder: its name
VERDICT = "{} is worse than the median of earlier jobs"
ABANDONED = timedelta(minutes=1)  # a trial without a folder, whose driver was killed as it asked


def opened(folder: Path, name: str, mode: str, settings: dict[str, Any]) -> Any:
    """The study of a sweep, which is made where there is none.

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
    if settings["pruner"] not in (None, "median"):
        raise UserError(f"sweep.pruner={settings['pruner']}: use median or null.")
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
    place = settings["storage"]
    direction: Any = {"min": "minimize", "max": "maximize"}[mode]
    try:
        if place is not None and "://" not in place:
            from optuna.storages.journal import JournalFileBackend

            backend = JournalFileBackend(place)
            storage: Any = optuna.storages.JournalStorage(backend)
        else:
            storage = optuna.storages.get_storage(place or f"sqlite:///{folder / 'study.db'}")
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            direction=direction,
            load_if_exists=True,
            sampler=sampler,
            # None would be the median pruner.
            pruner=getattr(optuna.pruners, f"{(settings['pruner'] or 'nop').title()}Pruner")(),
        )
    except Exception as error:  # of any database, or its driver
        said = str(error).partition("\n")[0]
        raise UserError(f"sweep.storage={place}: the study cannot be opened: {said}") from error
    if study.direction.name.lower() != direction:
        raise UserError(
            f"The study {name} in sweep.storage={place} does not seek mode={mode}.\n"
            "Use another name=<name>, or the mode that it was started with."
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
    """The jobs of a study that have their folders in that of this sweep.

    Args:
        study: of Optuna.
        folder: of the sweep.
        overrides: the words, of which some name several values.
        num_trials: jobs in all.
        objective: what is looked at while a job runs.
        retries_failed: whether failed jobs are tried again.
    """

    def __init__(
        self,
        study: Any,
        folder: Path,
        overrides: Sequence[Override],
        num_trials: int,
        objective: str,
        retries_failed: bool,
    ) -> None:
        from optuna.trial import TrialState

        super().__init__([], retries_failed=False)
        self.study, self.folder, self.states = study, folder, TrialState
        self.objective, self.num_jobs = objective, num_trials
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        varied = [override for override in overrides if override.is_sweep_override()]
        self.space = {override.get_key_element(): distribution(override) for override in varied}
        is_alone = (folder / "study.db").exists()
        jobs: dict[int, Job] = {}
        for trial in study.get_trials(deepcopy=False):
            is_running = trial.state == TrialState.RUNNING
            if is_running and JOB not in trial.user_attrs:
                if is_alone or datetime.now() - trial.datetime_start > ABANDONED:
                    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            elif self._is_mine(trial):
                job = self._job(trial)
                jobs[job.number] = job  # the last trial of a job counts
        self.known = [jobs[number] for number in sorted(jobs)]
        for job in self.known:
            state = study.get_trials(deepcopy=False)[job.trial].state
            status = job.status
            if state == TrialState.FAIL and status == "failed" and retries_failed:
                self._try_again(job)
                self.pending.append(job)
            elif state == TrialState.RUNNING and status in ENDED:
                self.ended(job, status)
            elif state == TrialState.RUNNING:
                self.pending.append(job)

    def made_up(self) -> Job | None:
        """Ask for another trial, if there are not enough."""
        if self._num_taken() >= self.num_jobs:
            return None
        trial = self.study.ask(self.space)
        if self._num_taken(before=trial.number) >= self.num_jobs:  # another driver was faster
            self.study.tell(trial.number, state=self.states.FAIL)
            return None
        (self.folder / str(trial.number)).mkdir(exist_ok=True)
        trial.set_user_attr(JOB, str(trial.number))  # from here on it counts
        job = self._job(self.study.get_trials(deepcopy=False)[trial.number])
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
            list(self._report(job))
            self.study.tell(job.trial, value, skip_if_finished=True)
        elif status in ENDED:
            self.study.tell(job.trial, state=self.states.FAIL, skip_if_finished=True)

    def is_hopeless(self, job: Job) -> str:
        """Report what a running job has reached, and ask the study's pruner."""
        if not any(self._report(job)):
            return ""
        # First of all the study: the job's folder follows, at the latest in ``settle``.
        self.study.tell(job.trial, state=self.states.PRUNED, skip_if_finished=True)
        return VERDICT.format(self.objective)

    def settle(self) -> None:
        """Let folders say what the study knows: a job that was pruned as its driver was killed."""
        trials = self.study.get_trials(deepcopy=False)
        for job in self.known:
            if trials[job.trial].state == self.states.PRUNED and job.status == "stopped":
                record.note(job.folder, status="pruned", reason=VERDICT.format(self.objective))

    def _report(self, job: Job) -> Iterator[bool]:
        """Report new values of a job's objective, each with what the study's pruner says."""
        import optuna

        frozen = self.study.get_trials(deepcopy=False)[job.trial]
        if isinstance(self.study.pruner, optuna.pruners.NopPruner) or frozen.state.is_finished():
            return
        trial = running_trial(self.study, frozen.number)
        points = job.run.curves.get(self.objective, [])
        start = len(frozen.intermediate_values)
        for index, (_, value) in enumerate(points[start:], start):
            trial.report(value, index)  # by validations: their steps depend on the batch size
            yield trial.should_prune()

    def _num_taken(self, before: int | None = None) -> int:
        """How many jobs there are, of all drivers: a failed one counts, tried again or not."""
        trials = self.study.get_trials(deepcopy=False)[:before]
        return len(
            {
                trial.user_attrs.get(JOB, str(trial.number))
                for trial in trials
                if JOB in trial.user_attrs or trial.state == self.states.RUNNING
            }
        )

    def _is_mine(self, trial: Any) -> bool:
        name = trial.user_attrs.get(JOB)
        return name is not None and (self.folder / name).is_dir()

    def _job(self, trial: Any) -> Job:
        name = trial.user_attrs[JOB]
        words = [f"{key}={value}" for key, value in trial.params.items()]
        return Job(int(name), [*self.fixed, *words], self.folder / name, trial.number)

    def _try_again(self, job: Job) -> None:
        """Give a failed job a new trial; the study keeps the old one as it is."""
        import optuna

        job.forget_failure()
        failed = self.study.get_trials(deepcopy=False)[job.trial]
        again = optuna.trial.create_trial(
            state=self.states.RUNNING,
            params=failed.params,
            distributions=failed.distributions,
            user_attrs={JOB: str(job.number)},
        )
        before = len(self.study.get_trials(deepcopy=False))
        self.study.add_trial(again)
        added = self.study.get_trials(deepcopy=False)[before:]
        job.trial = next(t.number for t in added if t.user_attrs.get(JOB) == str(job.number))
