"""Choose the folder of a command's run, and lock it: a new one, or that of the run it goes on with.

In: a checked ``Command``. Out: a ``RunChoice``, whose folder is locked and holds the config. Only
the first process of a run chooses. No torch, but to look whether a checkpoint is whole.
"""

import errno
import fcntl
import itertools
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from harness.command import resume, run_folder
from harness.command.compose import Command
from harness.command.run_folder import runs_in
from harness.command.validate import check_init
from harness.errors import UserError
from harness.processes.launch import global_rank
from harness.processes.launcher import launcher
from harness.record import NEXT

LOCK = ".lock"
LOCK_SECONDS = 120.0  # for which a network disk may keep the lock of a machine that has died


@dataclass(frozen=True)
class RunChoice:
    """What the first process has chosen for all.

    Attributes:
        run_dir: the folder, which exists.
        goes_on: whether it is that of a run which goes on.
        is_finished: whether nothing of it is left to do.
        checkpoint: to go on from; ``None`` where the run was stopped before its first.
    """

    run_dir: str
    goes_on: bool = False
    is_finished: bool = False
    checkpoint: str | None = None


def choose(command: Command, held: ExitStack) -> RunChoice:
    """Choose a run's folder, lock it until ``held`` is closed, and write the config there.

    Raises:
        UserError: if the run to go on with is alive, or the command asks for another result.
    """
    cfg, parent = command.cfg, parent_of(command)
    is_auto = command.task == "train" and cfg.resume == "auto"
    # Of several commands with resume=auto at a time one begins, and the others see its run.
    with choosing(parent) if is_auto else nullcontext():
        run_dir = find(command) if command.task == "train" else None
        if run_dir is not None:
            return _same(command, run_dir, held)
        if is_auto:
            of_task = "of this task of the array " if launcher().task and runs_in(parent) else ""
            print(f"There is no run {of_task}in {parent} to go on with: a new one starts.")
            cfg.resume = None
            check_init(cfg)
        return _new(command, parent, held)


def parent_of(command: Command) -> Path:
    """The folder in which a command's run has its own."""
    cfg = command.cfg
    if command.sweep_dir:
        return Path(command.sweep_dir).parent
    if command.task == "train":
        return Path(cfg.output_dir, cfg.name)
    trained = run_folder.config_of_checkpoint(Path(cfg.checkpoint)).parent
    return Path(cfg.output_dir or trained, command.task)


def _new(command: Command, parent: Path, held: ExitStack) -> RunChoice:
    run_dir = Path(command.sweep_dir or make(parent, launcher().job))
    run_dir.mkdir(parents=True, exist_ok=True)  # of a sweep
    held.enter_context(locked(run_dir))
    choice = RunChoice(str(run_dir))
    run_folder.save_config(frozen(command, choice), run_dir)
    run_folder.save_words(command.overrides, run_dir)
    return choice


def _same(command: Command, run_dir: Path, held: ExitStack) -> RunChoice:
    held.enter_context(locked(run_dir))
    config = resume.config(command, run_dir)
    if resume.is_finished(config, run_dir, command.rules["may_grow"]):
        print(resume.finished(run_dir))
        return RunChoice(str(run_dir), goes_on=True, is_finished=True)
    config.resume = resume.checkpoint(run_dir, config.get("resume"))
    run_folder.save_config(config, run_dir, NEXT)
    return RunChoice(str(run_dir), goes_on=True, checkpoint=config.resume)


def frozen(command: Command, choice: RunChoice) -> DictConfig:
    """The config with which this process computes a run."""
    if choice.goes_on:
        config = resume.config(command, Path(choice.run_dir))
        config.resume = choice.checkpoint
        return config
    if command.task == "train":
        command.cfg.resume = None  # it was auto, and there was no run
    return run_folder.freeze(command.cfg, Path(choice.run_dir))


def find(command: Command) -> Path | None:
    """The folder of the run to go on with; ``None`` starts a new one.

    What torchrun or Slurm has started again goes on with the newest run of the same words, also
    without ``resume``. A job of Slurm's, or a task of an array, goes on with runs of its own.
    """
    cfg, started_by = command.cfg, launcher()
    named = command.sweep_dir or (cfg.resume if cfg.resume != "auto" else None)
    if named and run_folder.is_run(Path(named)):
        return Path(named).resolve()
    if command.sweep_dir:
        return None
    runs = runs_in(parent_of(command))
    if named:
        hint = f"such as {runs[-1]}" if runs else "as <output_dir>/<name>/<date>_<time>"
        raise UserError(
            f"resume={named}: there is no run, which would have a config.yaml.\n"
            f"Use resume=auto, or the folder of a run {hint}."
        )
    if cfg.resume == "auto":
        if (task := started_by.task) is not None:
            runs = [run for run in runs if re.match(rf"slurm_\d+_{task}(?!\d)", run.name)]
        return runs[-1] if runs else None
    if not started_by.is_again or "resume=null" in command.overrides:
        return None
    words = _without_resume(command.overrides)
    runs = [run for run in runs if _without_resume(run_folder.load_words(run)) == words]
    if (job := started_by.job) is not None:
        runs = [run for run in runs if re.fullmatch(rf"{re.escape(job)}(_\d+)?", run.name)]
    if not runs:
        return None
    print(f"What has started this run has started it again: it goes on with {runs[-1]}.")
    return runs[-1]


def _without_resume(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("resume=")]


def make(parent: Path, name: str | None = None) -> Path:
    """Make a run's folder, by default named by the time; of equal names each gets a number."""
    stem = name or time.strftime("%Y-%m-%d_%H-%M-%S")
    with _writing():
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            path = parent / (stem if attempt == 1 else f"{stem}_{attempt}")
            with suppress(FileExistsError):
                path.mkdir()
                break
    return path.resolve()


@contextmanager
def choosing(parent: Path) -> Iterator[None]:
    """Wait until no other command of this machine or disk chooses among a folder's runs."""
    with _writing():
        parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
        with suppress(OSError):
            parent.rmdir()  # of a refused command; there is something in every other


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other commands from a run's folder; the system ends that with this process.

    Of several processes the first one does it. Where another command computes the run, a UserError
    says which.
    """
    if global_rank() > 0:
        yield
        return
    end = time.monotonic() + (LOCK_SECONDS if launcher().is_again else 0.0)
    with _writing():
        file = (run_dir / LOCK).open("a+")
    with file:
        while not _is_taken(file.fileno()):
            if time.monotonic() > end:
                file.seek(0)
                raise UserError(
                    f"The run in {run_dir} is alive: {file.read().strip() or 'a process'} computes "
                    "it.\nLet it end, or use resume=null to start another."
                )
            time.sleep(1.0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def _is_taken(descriptor: int) -> bool:
    """Take a lock, unless another process holds it; some network file systems have none."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


@contextmanager
def _writing() -> Iterator[None]:
    """Turn the system's refusal of a new file into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} was not written: {error.strerror}.\nChoose a folder that you may "
            "write to with output_dir=<folder>; a run that goes on may be copied there: "
            "resume=<copy>."
        ) from error


def remove_unused(run_dir: Path, is_own: bool = True) -> None:
    """Remove what a refused command has made: its new folder, or the next config of an older run.

    A sweep's job keeps its folder, for it is not its own.
    """
    is_old = (run_dir / NEXT).exists()
    (run_dir / NEXT).unlink(missing_ok=True)
    traces = ("checkpoints", "metrics.csv", "results.json")
    if is_own and not is_old and not any((run_dir / name).exists() for name in traces):
        shutil.rmtree(run_dir, ignore_errors=True)
        with suppress(OSError):  # there are other runs
            run_dir.parent.rmdir()
