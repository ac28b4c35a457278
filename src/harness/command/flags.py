"""The command's flags: what shows something and runs nothing, and ``-m``, which runs a sweep."""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import hydra

from harness import allowed
from harness.command import run_folder, sweep
from harness.command.compose import (
    Command,
    as_hydra_reads,
    explained,
    with_training_config,
)
from harness.command.explain import refuse_other_meanings
from harness.command.hydra_job import Job
from harness.command.yaml_files import check_experiments
from harness.errors import UserError
from harness.hydra_versions import VERSION_BASE, register_resolver
from harness.processes.launcher import launcher

# One sweep a process: the folder of another command's sweep has another name.
SWEEP_NAME = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")

MULTIRUN = sweep.FLAGS[-1]

register_resolver("sweep_name", lambda: SWEEP_NAME)


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

    Hydra counts a sweep's jobs and collects what they have reached. ``--experimental-rerun`` runs
    a job that PickleJobInfoCallback has written, in a folder of its own.

    Args:
        task: one of the three.
        conf: the folder of the config files.
        words: flags and settings.
        start: starts a job by a program, and returns its folder.
    """
    program = [sys.executable, os.path.abspath(sys.argv[0])]
    if sys.modules["__main__"].__spec__ is not None:
        program = [sys.executable, "-m", "harness", task]

    is_sweep = bool({*sweep.FLAGS} & {*words})
    if is_sweep:
        refuse_sweep_of_ranks(program, words)
    refuse_other_meanings(words)
    words = as_hydra_reads(task, words)
    if is_sweep and sweep.is_ours(task, words) and sweep.run(conf, words, program):
        return
    if task != "train":
        words = with_training_config(words)
    sys.argv[1:] = words
    job = Job(task, conf, words, start, program)
    try:
        with explained(task, words, conf), hydra_raises():
            if not any(word.startswith("--experimental-rerun") for word in words):
                check_experiments(task, words, conf)
            with allowed.building():
                hydra.main(config_path=str(conf), config_name=task, **VERSION_BASE)(job)()
        if task == "train" and any(re.match(r"data\.fold=.*[,(]", word) for word in words):
            sweep.join_folds(run_folder.sweeps(words) / SWEEP_NAME, conf)
    except OSError as error:
        raise UserError(
            f"The sweep's folder cannot be made: {error}.\n"
            "Choose a folder that you may write to with output_dir=<folder>."
        ) from error
    finally:
        run_folder.remove_unstarted(run_folder.sweeps(words) / SWEEP_NAME)


def refuse_sweep_of_ranks(program: Sequence[str], words: Sequence[str]) -> None:
    """Refuse a sweep that a launcher has started several times: each would name its own folder.

    Raises:
        UserError: with the command that runs it.
    """
    known = launcher()
    if not known.is_one_of_several:
        return
    script = sweep.typed(program)
    settings = {word.partition("=")[0] for word in words}
    chosen = {"strategy": "ddp", "trainer.devices": known.num_here}
    added = [f"{key}={value}" for key, value in chosen.items() if key not in settings]
    raise UserError(
        f"{known.name} has started {known.num_processes} processes, and each would run the whole "
        "sweep: a sweep starts the processes of its jobs itself.\n"
        f"Use python {script} {shlex.join([*words, *added])}"
    )


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
