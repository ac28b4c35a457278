"""Start a composed command: check it, choose its folder, compute the run there.

In: a ``Command``. Out: the run's folder. Next: ``harness.run.train``, where torch is imported.
Processes that a launcher has started meet first, and the first one chooses for all. A run that goes
on keeps its files until it trains again: see ``record.begin``.
"""

from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from harness import record
from harness.command import run_folder, validate, which_run
from harness.command.compose import Command
from harness.command.fingerprint import fingerprint
from harness.command.which_run import RunChoice
from harness.errors import UserError
from harness.processes import early, launch
from harness.processes.launch import global_rank
from harness.processes.launcher import launcher_of
from harness.processes.meeting import Meeting
from harness.strategies import launchable


def start(command: Command) -> Path:
    """Check a command, make its folder, freeze the config in it, and compute the run.

    Returns:
        The run's folder.

    Raises:
        UserError: where it cannot run; then no folder is left, and a run that it would have gone
            on with stays as it was.
    """
    validate.check(command)
    meeting = Meeting(launcher_of(command.cfg.trainer), command.cfg.join_minutes)
    with ExitStack() as held, meeting:

        def choose() -> dict[str, Any]:
            return asdict(which_run.choose(command, held))

        choice = RunChoice(**meeting.agree(lambda: fingerprint(command), choose))
        run_dir = Path(choice.run_dir)

        def undo() -> None:
            if global_rank() == 0:
                which_run.remove_unused(run_dir, is_own=command.sweep_dir is None)

        try:
            meeting.check_shared(run_dir)
            if not choice.is_finished:
                meeting.watch(undo)
                compute_in(run_dir, command.task, which_run.frozen(command, choice))
        except UserError:
            undo()
            raise
    return run_dir


def compute_in(run_dir: Path, task: str, frozen: DictConfig) -> None:
    """Compute a run whose folder is locked, and record how it ends; its ranks find the folder."""
    is_first = global_rank() == 0
    recording = record.recording(run_dir) if is_first else nullcontext()
    with recording, launch.environment_of_ranks(run_dir):
        if is_first and not (run_dir / record.NEXT).exists():  # else it begins as it trains
            record.begin(run_dir)
        compute(task, frozen)
    if is_first:  # of a dry run, which changes nothing
        (run_dir / record.NEXT).unlink(missing_ok=True)


def compute(task: str, frozen: DictConfig) -> None:
    """Train, evaluate or predict with a frozen config, as any rank of the run."""
    cfg = run_folder.resolved(frozen)
    if not launch.is_further_rank():  # else the first process has chosen for this one
        choose_gpus(cfg)
        early.start(task, launchable.num_further(cfg.trainer))
    from harness.run import train  # torch and Lightning; seconds

    early.wait()
    getattr(train, task)(cfg)


def choose_gpus(cfg: Any) -> None:
    """Take the GPUs that the config asks for, and say which they are.

    Raises:
        UserError: if they cannot be had.
    """
    if cfg.gpus.order == "visible":
        return
    validate.check_gpus(cfg)
    from harness.machine.choice import choose_emptiest
    from harness.machine.gpus import gib

    devices = cfg.trainer.devices
    num_wanted = None if devices in (-1, "auto") else int(devices)
    chosen = choose_emptiest(num_wanted, cfg.gpus.min_free_gib or 0)
    for index, gpu in enumerate(chosen):
        free = f"{gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free"
        print(f"cuda:{index} is GPU {gpu.number}: {gpu.name}, {free}")
