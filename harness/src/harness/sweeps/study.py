"""Let Optuna choose the settings of a sweep's jobs, by asking and telling.

In: parsed words, some with several values. Out: a queue whose jobs are the trials of a study.
A trial is RUNNING in the study until its job has ended, however often the driver or the job is
killed. Imports no torch, and fails to import without Optuna.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState

from harness.allowed import instantiate
from harness.errors import UserError
from harness.runs.reading import RunFiles
from harness.sweeps.driver import Job, Queue

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


class Study(Queue):
    """The trials of a study as jobs, until there are ``num_trials``, failed ones included.

    Args:
        settings: ``sampler``, ``storage`` (a URL, or ``None`` for a file in the sweep's folder)
            and ``num_trials``.
        mode: ``min`` or ``max``.
        overrides: the words of the jobs.

    Raises:
        UserError: if Optuna refuses a setting.
    """

    def __init__(self, settings: dict[str, Any], mode: str, overrides: Sequence[Override]) -> None:
        super().__init__([])
        self.num_jobs = settings["num_trials"]
        self.direction = StudyDirection.MINIMIZE if mode == "min" else StudyDirection.MAXIMIZE
        self.fixed = [str(o.input_line) for o in overrides if not o.is_sweep_override()]
        self.space, url = {}, settings.get("storage")
        for override in overrides:
            if override.is_sweep_override():
                with _in_a_line(str(override.input_line)):
                    self.space[override.get_key_element()] = distribution(override)
        with _in_a_line(f"sweep.sampler={settings['sampler'].get('_target_')}"):
            self.sampler = instantiate(settings["sampler"])
        with _in_a_line(f"sweep.storage={url}"):
            self.storage = url and optuna.storages.get_storage(url)

    def open(self, folder: Path) -> Self:
        """Create the study of a sweep's folder, or go on with it."""
        name, self.folder = folder.parent.name, folder
        self.study = optuna.create_study(
            storage=self.storage or f"sqlite:///{folder / 'study.db'}",
            study_name=f"{name}/{folder.name}" if self.storage else name,
            direction=self.direction,
            sampler=self.sampler,
            load_if_exists=True,
        )
        if self.study.direction != self.direction:
            raise UserError(f"The study of {folder} has another mode. Start another sweep.")
        for trial in self.study.get_trials(deepcopy=False):
            is_running = trial.state == TrialState.RUNNING
            if trial.params.keys() == self.space.keys():
                self.jobs.append(self._job(trial))
                self.waiting += self.jobs[-1:] if is_running else []
            elif is_running:  # the driver was killed while the sampler chose its values
                self.study.tell(trial.number, state=TrialState.FAIL)
        return self

    def next(self) -> Job | None:
        """Take a job that was cut off, or ask for another trial."""
        job = super().next()
        if job is None and len(self.jobs) < self.num_jobs:
            job = self._job(self.study.ask(self.space))
            self.jobs.append(job)
        return job

    def ended(self, job: Job, run: RunFiles) -> None:
        """Tell the study how a trial has ended; one that was cut off goes on later."""
        # A BruteForceSampler that has tried all values stops the study, which has no loop here.
        with suppress(RuntimeError):
            if run.status == "finished" and run.best is not None and math.isfinite(run.best):
                self.study.tell(job.number, run.best)
            elif run.status in ("finished", "failed"):
                self.study.tell(job.number, state=TrialState.FAIL)

    def _job(self, trial: Any) -> Job:
        words = [f"{key}={value}" for key, value in trial.params.items()]
        return Job(trial.number, [*self.fixed, *words], self.folder / str(trial.number))


def distribution(override: Override) -> Any:
    """Return the values among which Optuna chooses."""
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return CategoricalDistribution([*override.sweep_string_iterator()])
    ends = value.start, value.end
    kind: Any = IntDistribution if {*map(type, ends)} == {int} else FloatDistribution
    return kind(*ends, log="log" in value.tags)


@contextmanager
def _in_a_line(setting: str) -> Iterator[None]:
    """Turn Optuna's error about a setting into a line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise UserError(f"{setting}: {reason}") from error
