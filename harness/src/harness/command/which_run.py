"""Which run a command goes on with. No torch."""

import re
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig

from harness import frozen_files
from harness.command import run_folder
from harness.command.compose import Command
from harness.errors import UserError
from harness.processes.launcher import launcher


def find(command: Command, launchers: Collection[str] = ()) -> Path | None:
    """The folder of the run to go on with; ``None`` starts a new one.

    What torchrun or Slurm has started again goes on with what it had begun, also without
    ``resume``. A task of an array goes on with runs of its own number.

    Args:
        command: composed.
        launchers: of this start: see ``run_folder.started_by``.

    Raises:
        UserError: if ``resume`` names no run.
    """
    cfg, known = command.cfg, launcher()
    if command.sweep_dir:
        folder = Path(command.sweep_dir)
        return folder.resolve() if _is_run(folder) else None
    if cfg.resume not in (None, "auto"):
        return _named(cfg)
    runs = runs_in(Path(cfg.output_dir, cfg.name))
    is_wanted = "resume=null" not in command.overrides
    if is_wanted and (own := _started_before(command, runs, launchers)):
        print(f"What has started this run has started it again: it goes on with {own}.")
        return own
    if cfg.resume is None:
        return None
    if known.task is not None:
        mine = re.compile(rf"slurm_\d+_{known.task}(\.\d+)?")
        runs = [run for run in runs if any(map(mine.fullmatch, run_folder.started_by(run)))]
    return runs[-1] if runs else None


def _started_before(
    command: Command, runs: Sequence[Path], launchers: Collection[str]
) -> Path | None:
    """The run of these that the same torchrun, or the same job of Slurm, has started with this.

    Of a job any step will do, as steps side by side may change places. Its own is the first choice.
    """
    known = launcher()
    jobs = {_job_of(name) for name in launchers if known.num_restarts or name != known.job}
    own = [run for run in runs if jobs & {*map(_job_of, run_folder.started_by(run))}]
    words = _without_resume(command.overrides)
    same = [run for run in own if _without_resume(run_folder.load_words(run)) == words]
    if own and not same:
        names = ", ".join(sorted(jobs))
        print(f"{names} has begun with other words before: a new run starts.", file=sys.stderr)
    mine = [run for run in same if known.job in run_folder.started_by(run)]
    found = mine or same
    return found[-1] if found else None


def _job_of(launcher_name: str) -> str:
    """The name of a launcher without the step of a job."""
    is_slurm = launcher_name.startswith("slurm_")
    return launcher_name.partition(".")[0] if is_slurm else launcher_name


def _named(cfg: DictConfig) -> Path:
    run_dir = Path(cfg.resume)
    if not _is_run(run_dir):
        runs = runs_in(Path(cfg.output_dir, cfg.name))
        hint = f"such as {runs[-1]}" if runs else "as <output_dir>/<name>/<date>_<time>"
        raise UserError(
            f"resume={cfg.resume}: there is no run, which would have a config.yaml.\n"
            f"Use resume=auto, or the folder of a run {hint}."
        )
    return run_dir.resolve()


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "overrides.yaml"))


def _without_resume(words: Sequence[str]) -> list[str]:
    return [word for word in words if not word.startswith("resume=")]


def runs_in(parent: Path) -> list[Path]:
    """The runs in a folder, in the order in which they were started."""
    return sorted((path.parent.resolve() for path in parent.glob("*/overrides.yaml")), key=started)


def started(run_dir: Path) -> float:
    """When a run was started: as it has written itself, whatever the times of a copy's files."""
    path = run_dir / "overrides.yaml"
    with suppress(OSError, ValueError):
        text = path.read_text()
        if line := re.search(f"^{frozen_files.STARTED}(.+)$", text, re.MULTILINE):
            return datetime.fromisoformat(line[1]).timestamp()
    return path.stat().st_mtime


def nothing_to_go_on_with(parent: Path) -> str:
    """Say that a new run starts."""
    if launcher().task is not None and runs_in(parent):
        return f"There is no run of this task of the array in {parent}: a new one starts."
    return f"There is no run in {parent} to go on with: a new one starts."
