"""A sweep as it is typed: its jobs, its folder, and the same command again. No torch.

Hydra's parser reads the words, and every combination is a job, as with Hydra's own sweeper. The
jobs are run by ``harness.sweeps``, which survives and fills the machine; Hydra's sweeper calls one
function after the other in one process.
"""

import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from harness import allowed, frozen_files
from harness.command import run_folder, sweep_words, validate, which_run
from harness.command.compose import Command, as_hydra_reads, compose_command
from harness.errors import UserError
from harness.machine import num_gpus
from harness.places import shown
from harness.processes.launcher import launcher
from harness.strategies.launchable import device_indices
from harness.sweeps import view
from harness.sweeps.driver import Driver
from harness.sweeps.jobs import ENDED, Jobs, grid
from harness.sweeps.slots import Needs, Slots

MULTIRUN = ("-m", "--multirun", "hydra.mode=MULTIRUN")
JOBS = "jobs.yaml"
MOST_TRIED = 20  # jobs, until one can be composed


def run(task: str, conf: Path, words: Sequence[str]) -> None:
    """Run a sweep to its end, or go on with one.

    Args:
        task: ``train``.
        conf: the folder of the config files.
        words: ``-m`` and settings, of which some name several values.

    Raises:
        UserError: for a mistake in the command; then nothing is left.
        SystemExit: with 1 where a job has not finished, and 128 + a signal's number.
    """
    words = [word for word in words if word not in MULTIRUN]
    if task != "train":
        raise UserError(
            f"-m is for trainings: python train.py -m <words>. Call {task}.py once for each "
            "checkpoint."
        )
    if flags := [word for word in words if word.startswith("-")]:
        raise UserError(f"-m runs a sweep, and {flags[0]} asks for something else. Leave out one.")
    program = [sys.executable, os.path.abspath(sys.argv[0])]
    if sys.modules["__main__"].__spec__ is not None:
        program = [sys.executable, "-m", "harness", task]
    refuse_sweep_of_ranks(program, words)
    allowed.follow(conf)
    words = as_hydra_reads(task, words, conf)
    asked = [word for word in words if sweep_words.key_of(word) == "resume"]
    wanted = asked[-1].partition("=")[2].strip("'\"") if asked else "null"
    words = [word for word in words if word not in asked]
    if wanted not in ("null", "auto"):
        words = sweep_words.words_of(Path(wanted), words)
    overrides = sweep_words.parsed(conf, words)
    command = first_valid(conf, overrides)
    check(command, overrides)
    jobs = None if is_optuna(command) else sweep_words.combinations(overrides)
    parent = Path(command.cfg.output_dir, "sweeps", name_of(command))
    with which_run.choosing(parent):
        folder = sweep_words.found(parent, words) if wanted == "auto" else None
        folder = folder if wanted in ("null", "auto") else Path(wanted).resolve()
        folder = folder or made(parent, words, jobs, command)
    with which_run.locked(folder):
        drive(folder, command, overrides, words, program)


def refuse_sweep_of_ranks(program: Sequence[str], words: Sequence[str]) -> None:
    """Refuse a sweep that a launcher has started several times: each would name its own folder.

    Raises:
        UserError: with the command that runs it.
    """
    known = launcher()
    if not known.is_one_of_several:
        return
    settings = {word.partition("=")[0] for word in words}
    chosen = {"strategy": "ddp", "trainer.devices": known.num_here}
    added = [f"{key}={value}" for key, value in chosen.items() if key not in settings]
    raise UserError(
        f"{known.name} has started {known.num_processes} processes, and each would run the whole "
        "sweep: a sweep starts the processes of its jobs itself.\n"
        f"Use python {typed(program)} -m {shlex.join([*words, *added])}"
    )


def drive(
    folder: Path,
    command: Command,
    overrides: Sequence[Override],
    words: Sequence[str],
    program: Sequence[str],
) -> None:
    """Run what is left of a sweep in its folder, and leave with its exit status."""
    settings = command.sweep
    slots = Slots(num_parallel(settings.get("num_parallel", "auto")))
    jobs = jobs_of(folder, command, overrides)
    varied = [override.key_or_group for override in overrides if override.is_sweep_override()]
    screen = view.View(varied)
    left = max(jobs.num_jobs - sum(job.status in ENDED for job in jobs.known), 0)
    screen.say(f"{jobs.num_jobs} jobs in {shown(folder)}, {left} to run, {slots.num} at a time")

    def needs_of(job_words: list[str]) -> tuple[Needs, list[str]]:
        return needs(command.conf, job_words)

    signum = Driver(jobs, slots, program, needs_of, screen).run()
    view.print_end(folder, jobs.known)
    if signum or not all(job.status == "finished" for job in jobs.known):
        failed = any(job.status == "failed" for job in jobs.known) and not is_optuna(command)
        retry = " sweep.retry_failed=true" if failed else ""
        print(f"Go on with: python {typed(program)} -m resume={shlex.quote(shown(folder))}{retry}")
        sys.exit(128 + signum if signum else 1)


def jobs_of(folder: Path, command: Command, overrides: Sequence[Override]) -> Jobs:
    """The jobs of a sweep, of which some may have ended."""
    if not is_optuna(command):
        typed_jobs = run_folder.as_typed(frozen_files.read_yaml(folder / JOBS))
        return grid(folder, typed_jobs, bool(command.sweep.get("retry_failed")))
    from harness.sweeps.study import Study

    kept = [override for override in overrides if not sweep_words.is_of_sweep(override)]
    num_trials, objective = command.sweep["num_trials"], str(command.cfg.objective)
    return Study(study_of(folder, command), folder, kept, num_trials, objective)


def study_of(folder: Path, command: Command) -> Any:
    """The study of a sweep in a folder."""
    from harness.sweeps.study import opened

    return opened(folder, name_of(command), command.cfg.mode, command.sweep)


def is_optuna(command: Command) -> bool:
    """Whether Optuna makes up the jobs."""
    return "num_trials" in command.sweep


def name_of(command: Command) -> str:
    """The name of a sweep, and of its study."""
    return str(command.cfg.name or command.choices.get("experiment") or "default")


def needs(conf: Path, words: list[str]) -> tuple[Needs, list[str]]:
    """What a job computes on, and the words with which it is started there."""
    try:
        command = compose_command("train", words, conf)
        validate.check(command)
    except UserError:
        return Needs(), words  # its own process says why it cannot run
    cfg = command.cfg
    there = num_gpus()
    if not there or sys.platform == "darwin" or cfg.trainer.accelerator in ("cpu", "mps"):
        return Needs(), words
    devices = cfg.trainer.devices
    is_all = devices in (-1, "-1", "auto") or device_indices(devices) is not None
    if "gpus" in cfg and cfg.gpus.order != "visible":  # the driver chooses
        words = [*words, "gpus=visible", "gpus.min_free_gib=null"]
    least = (cfg.get("gpus") or {}).get("min_free_gib") or 0.0
    return Needs(there if is_all else int(devices), float(least)), words


def check(command: Command, overrides: Sequence[Override]) -> None:
    """Refuse settings of a sweep before it has a folder.

    Raises:
        UserError: with what to type instead.
    """
    num_parallel(command.sweep.get("num_parallel", "auto"))
    if not is_optuna(command):
        return
    num_trials = command.sweep["num_trials"]
    if isinstance(num_trials, bool) or not isinstance(num_trials, int) or num_trials < 1:
        raise UserError(f"sweep.num_trials={num_trials} must be a whole number, 1 or more.")
    if command.cfg.objective is None:
        raise UserError("sweep=optuna needs an objective: what is to be the best.")
    if command.sweep.get("retry_failed"):
        raise UserError(
            "sweep.retry_failed=true tries a grid's failed jobs again; a study takes other values "
            "instead.\nAdd sweep.num_trials=<more>."
        )
    varied = [override for override in overrides if override.is_sweep_override()]
    if not varied:
        raise UserError(
            "sweep=optuna has nothing to choose: every job would be the same.\n"
            'Add values, such as "model.optimizer.lr=tag(log,interval(1e-4,1e-1))".'
        )
    if find_spec("optuna"):  # else it is told where the study is opened
        from harness.sweeps import study

        for override in varied:
            study.distribution(override)


def num_parallel(value: Any) -> int | None:
    """How many jobs are asked for at a time; ``None`` is as many as there are GPUs.

    Raises:
        UserError: if it is no number of jobs.
    """
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"sweep.num_parallel={value} must be a whole number, 1 or more, or auto.")
    return value


def typed(program: Sequence[str]) -> str:
    """The script or module of a program, as a person types it."""
    return os.path.relpath(program[1]) if len(program) == 2 else shlex.join(program[1:])


def first_valid(conf: Path, overrides: Sequence[Override]) -> Command:
    """The first job that can be composed: a mistake of another one is that job's.

    Raises:
        UserError: the first mistake, if all jobs have one.
    """
    first: UserError | None = None
    words_of_jobs = itertools.product(*map(sweep_words.values_of, overrides))
    for words in itertools.islice(words_of_jobs, MOST_TRIED):
        try:
            command = compose_command("train", words, conf)
            command.is_sweep = True
            validate.check(command)
            return command
        except UserError as error:
            first = first or error
    raise first or UserError("A word of the sweep has no values.")


def made(
    parent: Path, words: Sequence[str], jobs: Sequence[Sequence[str]] | None, command: Command
) -> Path:
    """Make a sweep's folder; it is one when its words are written, the last of all."""
    folder = which_run.make(parent)
    if jobs is None:
        try:
            study_of(folder, command)
        except UserError:
            which_run.remove_unused(folder)
            raise
    else:
        text = OmegaConf.to_yaml(OmegaConf.create([list(job) for job in jobs]))
        frozen_files.write_yaml(folder / JOBS, text)
    run_folder.save_words([*words], folder)
    return folder
