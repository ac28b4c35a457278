"""A run as a job of Hydra's: the function that Hydra calls, and the callbacks around a plain run.

In a sweep Hydra calls ``hydra.callbacks`` itself. A plain run does without Hydra's main function,
which makes folders before a command is checked: the callbacks are called here, in Hydra's order.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from harness import allowed
from harness.allowed import instantiate
from harness.command import run_folder
from harness.command.compose import Command, explained, from_hydra
from harness.errors import UserError
from harness.processes.launch import global_rank
from harness.processes.launcher import launcher


@dataclass(frozen=True)
class Job:
    """Hydra's task function; a callback may pickle it with the config, to run the job again.

    Attributes:
        task: one of the three.
        conf: the folder of the config files.
        words: flags and settings of the command.
        start: starts a run by a program, and returns its folder.
        program: runs a job of a sweep.
    """

    task: str
    conf: Path
    words: Sequence[str]
    start: Callable[[Command, Sequence[str]], Path]
    program: Sequence[str]

    def __call__(self, cfg: DictConfig) -> float | None:
        """Run the job, and return what a sweep optimises."""
        allowed.follow(self.conf)  # a launcher may have brought it to another process
        command = from_hydra(self.task, cfg, self.conf, self.words)
        if not GlobalHydra.instance().is_initialized():  # it runs again, and not in its old folder
            command.is_sweep, command.sweep_dir = False, None
            run_dir = self.start(command, ())
            return objective_of(run_dir, None)
        is_task = launcher().is_one_of_several  # of a job that submitit has sent to Slurm
        run_dir = self.start(command, () if is_task else self.program)
        # A grid has no use for the value, which a module may log by another name.
        is_grid = str(HydraConfig.get().sweeper.get("_target_")).endswith("BasicSweeper")
        return objective_of(run_dir, cfg.get("objective"), is_needed=not is_grid)


def objective_of(run_dir: Path, objective: str | None, is_needed: bool = True) -> float | None:
    """What a sweep optimises, from a job's results.

    Raises:
        UserError: if it is needed, and the job has not logged it.
    """
    if objective is None:
        return None
    results = run_folder.results(run_dir)
    if objective not in results:
        if not is_needed:
            return None
        raise UserError(
            f"objective={objective} is not among the results of {run_dir}: "
            f"{', '.join(results)}.\nUse one of these, or objective=null."
        )
    return results[objective]


@contextmanager
def run_callbacks(command: Command) -> Iterator[Command]:
    """Call ``on_run_start`` and ``on_run_end`` of ``hydra.callbacks`` around a plain run.

    Each process that composes the command calls the former, which may change the config; the
    run's first process calls all others.

    Yields:
        The command that ``on_run_start`` has left.
    """
    if command.whole is None:
        yield command
        return
    config, name = command.whole, command.task
    with explained(name, command.overrides, command.conf):
        callbacks = [instantiate(node) for node in config.hydra.callbacks.values() if node]
    _call(callbacks, "on_run_start", config=config, config_name=name)
    HydraConfig.instance().set_config(config)
    changed = from_hydra(name, copy.deepcopy(config), command.conf, command.places)
    changed.whole, changed.callbacks = config, callbacks
    changed.job_return = JobReturn(task_name=name)
    try:
        yield changed
    except Exception as error:
        if changed.job_return.status is JobStatus.UNKNOWN:  # it was refused
            _finish(changed.job_return, JobStatus.FAILED, error)
        raise
    finally:
        if global_rank() == 0:
            given = {"config": config, "config_name": name, "job_return": changed.job_return}
            _call(callbacks[::-1], "on_run_end", **given)


@contextmanager
def job_callbacks(command: Command, run_dir: Path, start: Callable[..., Path]) -> Iterator[None]:
    """Call ``on_job_start`` and ``on_job_end`` around what a run computes in its folder."""
    config, returned = command.whole, command.job_return
    if config is None or returned is None or global_rank() > 0:
        yield
        return
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(run_dir)
    configure_log(config.hydra.job_logging, config.hydra.verbose)
    overrides: Any = OmegaConf.to_container(config.hydra.overrides.task)
    returned.overrides, returned.working_dir = overrides, os.getcwd()
    returned.cfg = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    returned.hydra_cfg = OmegaConf.masked_copy(config, ["hydra"])
    job = Job(command.task, command.conf, command.places, start, ())
    _call(command.callbacks, "on_job_start", config=config, task_function=job)
    try:
        yield
        objective = command.cfg.get("objective")
        _finish(returned, JobStatus.COMPLETED, run_folder.results(run_dir).get(objective))
    except Exception as error:
        _finish(returned, JobStatus.FAILED, error)
        raise
    finally:
        if returned.status is not JobStatus.UNKNOWN:  # no signal has ended it
            _call(command.callbacks[::-1], "on_job_end", config=config, job_return=returned)


def _finish(returned: JobReturn, status: JobStatus, value: Any) -> None:
    returned.status, returned.return_value = status, value


def _call(callbacks: Sequence[Any], hook: str, **arguments: Any) -> None:
    """Call a hook of each; as in Hydra, one that fails is told and stops nothing."""
    for callback in callbacks:
        try:
            getattr(callback, hook)(**arguments)
        except Exception as error:
            said = f"{type(callback).__name__}.{hook} raised {type(error).__name__}: {error}"
            warnings.warn(f"Callback {said}", stacklevel=2)
