"""Start a composed command: check it, choose its folder, compute the run there.

In: a ``Command``. Out: the run's folder. Next: ``harness.run.train``, where torch is imported.
Processes that a launcher has started meet first, and the first one chooses for all. What is checked
is checked before anything is written; a run that goes on keeps its files until it trains again.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness import record
from harness.command import gpus, locked_folder, run_folder, validate, which_run
from harness.command.compose import Command, explained
from harness.command.which_run import Place
from harness.errors import UserError
from harness.processes import early, launch
from harness.processes.launcher import known_of
from harness.processes.meeting import Meeting
from harness.quick_imports import quick_imports
from harness.strategies import launchable


def start(command: Command) -> Path:
    """Check a command, make its folder, freeze the config in it, and compute the run.

    Args:
        command: composed.

    Returns:
        The run's folder.

    Raises:
        UserError: where it cannot run; then no folder is left, and a run that it would have gone
            on with stays as it was.
    """
    with explained(command.task, command.overrides, command.conf):
        validate.check(command)
    if command.task == "train":
        command.cfg.name = str(command.cfg.name or command.choices.get("experiment") or "default")
    meeting = Meeting(known_of(command.cfg.trainer), command.cfg.join_minutes)
    parent = which_run.parent_of(command)
    with locked_folder.writable(parent), ExitStack() as held, meeting.telling_failure():
        if not meeting.is_alone:
            from harness.command.what_counts import what_counts  # asked for by few

            meeting.compare(what_counts(command))

        def choose() -> dict[str, Any]:
            return asdict(which_run.choose(command, held))

        place = Place(**meeting.decided(choose))
        if not place.is_finished:
            with _removed_if_refused(command, place) as undo:
                meeting.see(Path(place.run_dir))
                meeting.watch(undo)
                frozen = which_run.frozen(command, place)
                compute_in(Path(place.run_dir), command.task, frozen)
    return Path(place.run_dir)


@contextmanager
def _removed_if_refused(command: Command, place: Place) -> Iterator[Any]:
    """Leave nothing of a command that has turned out to be a mistake before it trained."""

    def undo() -> None:
        if launch.global_rank() == 0:
            locked_folder.remove_unused(Path(place.run_dir), is_own=command.sweep_dir is None)

    try:
        yield undo
    except UserError:
        undo()
        raise
    if launch.global_rank() == 0:  # of a dry run, which changes nothing
        (Path(place.run_dir) / record.NEXT).unlink(missing_ok=True)


def compute_in(run_dir: Path, task: str, frozen: DictConfig) -> None:
    """Compute a run whose folder is locked, and record how it ends; its ranks find the folder."""
    is_first = launch.global_rank() == 0
    recording = record.recording(run_dir) if is_first else nullcontext()
    with recording, launch.telling_ranks(run_dir):
        if is_first and not (run_dir / record.NEXT).exists():  # else it begins as it trains
            record.begin(run_dir)
        compute(task, frozen)


def compute(task: str, frozen: DictConfig) -> None:
    """Train, evaluate or predict with a frozen config, as any rank of the run."""
    cfg = run_folder.resolved(frozen)
    if not launch.is_rank_of_a_run():  # else the first process has chosen for this one
        gpus.choose(cfg)
        early.start(task, launchable.num_further(cfg.trainer))
    with quick_imports():
        from harness.upstream import late_imports

        late_imports.import_torchmetrics()
        from harness.run import train  # torch and Lightning; seconds

    early.wait()
    getattr(train, task)(cfg)
