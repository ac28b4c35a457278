"""The command's flags: what shows something and runs nothing, and ``-m``, which runs a sweep."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from harness.command import run_folder
from harness.command.compose import (
    Command,
    explained,
    from_hydra,
    with_choices_for_null,
    with_training_config,
)
from harness.command.explain import refuse_numbers_of_gpus
from harness.command.yaml_files import check_experiments
from harness.errors import UserError

# One sweep a process: the folder of another command's sweep has another name.
SWEEP_NAME = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")

OmegaConf.register_new_resolver("sweep_name", lambda: SWEEP_NAME, replace=True)


def without_flags(arguments: Sequence[str]) -> list[str]:
    """Write those of Hydra's flags as words which only say where config files are.

    Raises:
        UserError: for flags that choose another config than the command's.
    """
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in ("-cd", "--config-dir"):
            name = value if equals else next(rest, "")
            folder = Path(name)
            if not name or not folder.is_dir():
                raise UserError(f"{flag} {folder}: there is no such folder.")
            words.append(f"hydra.searchpath=[file://{folder.resolve()}]")
        elif flag in ("-cn", "--config-name", "-cp", "--config-path"):
            raise UserError(
                f"{flag}: a command has its own config. Choose settings with experiment=<name>; "
                "-cd <folder> adds a folder of config files."
            )
        elif argument not in ("-r", "--run"):
            words.append(argument)
    # Hydra takes "seed=1 -m model=mlp" only with the flag in front.
    return sorted(words, key=lambda word: word not in ("-m", "--multirun"))


def let_hydra_answer(
    task: str, conf: Path, words: list[str], start: Callable[[Command, Sequence[str]], Path]
) -> None:
    """``--help``, ``--cfg``, ``--info`` and completion; and ``-m``, whose jobs start inside Hydra.

    Hydra counts a sweep's jobs and collects what they have reached.

    Args:
        task: one of the three.
        conf: the folder of the config files.
        words: flags and settings.
        start: starts a job by a program, and returns its folder.
    """
    program = [sys.executable, os.path.abspath(sys.argv[0])]
    if sys.modules["__main__"].__spec__ is not None:
        program = [sys.executable, "-m", "harness", task]

    def start_job(cfg: DictConfig) -> Any:
        command = from_hydra(task, cfg, conf, words)
        run_dir = start(command, program)
        # A grid has no use for the value, which a module may log by another name.
        is_grid = str(HydraConfig.get().sweeper.get("_target_")).endswith("BasicSweeper")
        return None if is_grid else objective_of(run_dir, cfg.get("objective"))

    refuse_numbers_of_gpus(words)
    words = with_choices_for_null(task, words)
    if task != "train":
        words = with_training_config(words)
    sys.argv[1:] = words
    try:
        with explained(task, words, conf), hydra_raises():
            check_experiments(task, words, conf)
            hydra.main(config_path=str(conf), config_name=task, version_base="1.3")(start_job)()
    except OSError as error:
        raise UserError(
            f"The sweep's folder cannot be made: {error}.\n"
            "Choose a folder that you may write to with output_dir=<folder>."
        ) from error
    finally:
        run_folder.remove_unstarted(run_folder.sweeps(words) / SWEEP_NAME)


@contextmanager
def hydra_raises() -> Iterator[None]:
    """Let Hydra raise its errors; by default it prints them and exits."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


def objective_of(run_dir: Path, objective: str | None) -> float | None:
    """What a sweep optimises, from a job's results.

    Raises:
        UserError: if the job has not logged it.
    """
    if objective is None:
        return None
    results = run_folder.results(run_dir)
    if objective not in results:
        raise UserError(
            f"objective={objective} is not among the results of {run_dir}: "
            f"{', '.join(results)}.\nUse one of these, or objective=null."
        )
    return results[objective]
