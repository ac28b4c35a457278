"""Choose the folder of a command's run: a new one, or that of the run that it goes on with.

In: a checked ``Command``. Out: a ``Place``, whose folder is locked and has the config. Only the
first process of a run does this. No torch, but to look whether a checkpoint is whole.
"""

import re
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from harness.command import locked_folder, resume, run_folder
from harness.command.compose import Command
from harness.command.run_folder import runs_in
from harness.command.validate import check_init
from harness.errors import UserError
from harness.processes.launcher import launcher


@dataclass(frozen=True)
class Place:
    """What the first process has chosen for all.

    Attributes:
        run_dir: the folder, which is there.
        goes_on: whether it is that of a run which goes on.
        is_finished: whether nothing of it is left to do.
        checkpoint: to go on from; ``None`` where the run was stopped before its first.
    """

    run_dir: str
    goes_on: bool = False
    is_finished: bool = False
    checkpoint: str | None = None


def choose(command: Command, held: ExitStack) -> Place:
    """Choose a run's folder, keep other commands from it, and write the config there.

    Args:
        command: checked.
        held: keeps the lock.

    Raises:
        UserError: if the run to go on with is alive, or the command asks for another result.
    """
    cfg, parent = command.cfg, parent_of(command)
    if command.task != "train":
        return _new(command, parent, held)
    # Of several commands with resume=auto at a time one begins, and the others see its run.
    with locked_folder.choosing(parent) if cfg.resume == "auto" else nullcontext():
        run_dir = find(command)
        if run_dir is None:
            if cfg.resume == "auto":
                print(_nothing_to_go_on_with(parent))
                cfg.resume = None
                check_init(cfg)
            return _new(command, parent, held)
    return _same(command, run_dir, held)


def parent_of(command: Command) -> Path:
    """The folder in which a command's run has its own."""
    cfg = command.cfg
    if command.sweep_dir:
        return Path(command.sweep_dir).parent
    if command.task == "train":
        return Path(cfg.output_dir, cfg.name)
    trained = run_folder.config_of_checkpoint(Path(cfg.checkpoint)).parent
    return Path(cfg.output_dir or trained, command.task)


def _new(command: Command, parent: Path, held: ExitStack) -> Place:
    if command.sweep_dir:
        run_dir = Path(command.sweep_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    else:
        run_dir = locked_folder.make(parent, launcher().job)
    held.enter_context(locked_folder.locked(run_dir))
    place = Place(str(run_dir))
    run_folder.save_config(frozen(command, place), run_dir)
    run_folder.save_words(command.overrides, run_dir)
    return place


def _same(command: Command, run_dir: Path, held: ExitStack) -> Place:
    held.enter_context(locked_folder.locked(run_dir))
    config = resume.config(command, run_dir)
    if resume.is_finished(config, run_dir, command.rules["may_grow"]):
        print(resume.finished(run_dir))
        return Place(str(run_dir), goes_on=True, is_finished=True)
    config.resume = resume.checkpoint(run_dir, config.get("resume"))
    run_folder.save_next_config(config, run_dir)
    return Place(str(run_dir), goes_on=True, checkpoint=config.resume)


def frozen(command: Command, place: Place) -> DictConfig:
    """The config with which this process computes a run."""
    run_dir = Path(place.run_dir)
    if not place.goes_on:
        if command.task == "train":
            command.cfg.resume = None  # there was nothing to go on with
        return run_folder.freeze(command.cfg, run_dir)
    config = resume.config(command, run_dir)
    config.resume = place.checkpoint
    return config


def find(command: Command) -> Path | None:
    """The folder of the run to go on with; ``None`` starts a new one.

    What torchrun or Slurm has started again goes on with the newest run of the same words, also
    without ``resume``. A job of Slurm's, or a task of an array, goes on with runs of its own.

    Args:
        command: composed.

    Raises:
        UserError: if ``resume`` names no run.
    """
    cfg, known = command.cfg, launcher()
    if command.sweep_dir:
        folder = Path(command.sweep_dir)
        return folder.resolve() if run_folder.is_run(folder) else None
    if cfg.resume not in (None, "auto"):
        return _named(cfg)
    runs = runs_in(Path(cfg.output_dir, cfg.name))
    if cfg.resume is None:
        if not known.is_again or "resume=null" in command.overrides:
            return None
        words = _without_resume(command.overrides)
        runs = [run for run in runs if _without_resume(run_folder.load_words(run)) == words]
        if known.job is not None:
            runs = [
                run for run in runs if re.fullmatch(rf"{re.escape(known.job)}(_\d+)?", run.name)
            ]
        if runs:
            print(f"What has started this run has started it again: it goes on with {runs[-1]}.")
    elif known.task is not None:
        mine = re.compile(rf"slurm_\d+_{known.task}(\.\d+)?(_\d+)?")
        runs = [run for run in runs if mine.fullmatch(run.name)]
    return runs[-1] if runs else None


def _named(cfg: DictConfig) -> Path:
    run_dir = Path(cfg.resume)
    if not run_folder.is_run(run_dir):
        runs = runs_in(Path(cfg.output_dir, cfg.name))
        hint = f"such as {runs[-1]}" if runs else "as <output_dir>/<name>/<date>_<time>"
        raise UserError(
            f"resume={cfg.resume}: there is no run, which would have a config.yaml.\n"
            f"Use resume=auto, or the folder of a run {hint}."
        )
    return run_dir.resolve()


def _without_resume(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("resume=")]


def _nothing_to_go_on_with(parent: Path) -> str:
    if launcher().task is not None and runs_in(parent):
        return f"There is no run of this task of the array in {parent}: a new one starts."
    return f"There is no run in {parent} to go on with: a new one starts."
