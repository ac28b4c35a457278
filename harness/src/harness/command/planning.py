"""Where a command computes: in a new folder, or in that of a run which it goes on with."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from harness.command import resume, run_folder, which_run
from harness.command.compose import Command
from harness.command.validate import check_init
from harness.errors import UserError
from harness.files import FULL
from harness.processes.launcher import Launcher, launcher


def known_of(trainer: DictConfig) -> Launcher:
    """Who has started this process; where a person has typed it on several machines, these."""
    known, num_nodes = launcher(), trainer.num_nodes
    if known.name == "python" and num_nodes > 1:
        rank = int(os.environ["NODE_RANK"])
        return replace(known, rank=rank, num_processes=num_nodes, num_nodes=num_nodes)
    return known


@dataclass(frozen=True)
class Plan:
    """What the first process decides for all.

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


def planned(
    command: Command, launchers: set[str], held: ExitStack, chosen: ExitStack, locks: bool
) -> Plan:
    """Choose a run's folder, and keep other commands from it.

    Args:
        command: checked.
        launchers: of all processes of the run.
        held: keeps the lock.
        chosen: keeps other commands from choosing, until this one's run is to be seen.
        locks: whether this process computes the run; else its program locks it.

    Raises:
        UserError: if the run to go on with is alive, or the command asks for another result.
    """
    cfg = command.cfg

    def lock(run_dir: Path) -> None:
        held.enter_context(writable(run_dir))
        if locks:
            held.enter_context(run_folder.locked(run_dir))

    if command.task != "train":
        trained = run_folder.config_of_checkpoint(Path(cfg.checkpoint)).parent
        parent = Path(cfg.output_dir or trained, command.task)
    else:
        parent = Path(cfg.output_dir, cfg.name)
        if cfg.resume == "auto":
            chosen.enter_context(run_folder.choosing(parent))
        if run_dir := which_run.find(command, launchers):
            chosen.close()  # that run's lock may be waited for
            lock(run_dir)
            frozen = resume.config(command, run_dir)
            if resume.is_finished(frozen, run_dir, command.rules["may_grow"]):
                print(resume.finished(run_dir))
                return Plan(str(run_dir), goes_on=True, is_finished=True)
            path = resume.checkpoint(run_dir, frozen.get("resume"))
            run_folder.note_start(run_dir, launchers)
            return Plan(str(run_dir), goes_on=True, checkpoint=path)
        if cfg.resume == "auto":
            print(which_run.nothing_to_go_on_with(parent))
        cfg.resume = None
        try:
            check_init(cfg)
        except UserError:
            with suppress(OSError):  # it has runs
                parent.rmdir()
            raise
    if command.sweep_dir:
        run_dir = Path(command.sweep_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    else:
        run_dir = run_folder.make(parent, launcher().job)
    lock(run_dir)
    run_folder.note_start(run_dir, launchers)
    return Plan(str(run_dir))


@contextmanager
def writable(run_dir: Path) -> Iterator[None]:
    """Say in a sentence where the system does not let a run write in its own folder.

    Raises:
        UserError: with what to do.
    """
    try:
        yield
    except OSError as error:
        if not Path(str(error.filename)).is_relative_to(run_dir):
            raise
        if error.errno in FULL:
            then = "Free space on its disk, and go on with resume=auto"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            then = "Copy the run to a folder that you may write to, and go on with resume=<copy>"
        else:
            raise
        raise UserError(f"{error.filename} was not written: {error.strerror}.\n{then}.") from error
