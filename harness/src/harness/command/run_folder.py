"""The one folder of a run, shared by all its processes."""

import errno
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness import frozen_files
from harness.errors import UserError
from harness.processes.launch import global_rank
from harness.processes.launcher import launcher

LOCK = ".lock"
HELD = (errno.EAGAIN, errno.EACCES)  # by another process
STARTS = ".starts"  # a line for each start by a launcher: when, and by whom
LOCK_SECONDS = 120.0  # for which a network disk may keep the lock of a machine that has died


def make(parent: Path, stem: str | None = None) -> Path:
    """Make a run's folder; of runs that would have the same one, each gets its own.

    Args:
        parent: where runs of this kind go.
        stem: its name, such as that of a job of Slurm's; by default the time.

    Raises:
        UserError: if the folder cannot be made.
    """
    if "${" in str(parent.absolute()):
        raise UserError(
            f"The run's folder below {parent.absolute()} has ${{ in its name, which a config takes "
            "for another key.\nChoose another folder with output_dir=<folder>."
        )
    stem = stem or time.strftime("%Y-%m-%d_%H-%M-%S")
    attempt = 1
    with _making(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = parent / (stem if attempt == 1 else f"{stem}_{attempt}")
            with suppress(FileExistsError):
                path.mkdir()
                return path.resolve()
            attempt += 1


@contextmanager
def choosing(parent: Path) -> Iterator[None]:
    """Wait until no other command of this machine or disk chooses a run of a folder."""
    with _making(parent):
        parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def _making(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"The run's folder below {parent} cannot be made: {error.strerror}.\n"
            "Choose a folder that you may write to with output_dir=<folder>."
        ) from error


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other commands from a run's folder; the system ends that with this process.

    Of several processes the first one does it.

    Raises:
        UserError: if another command computes this run.
    """
    if global_rank() > 0:
        yield
        return
    end = time.monotonic() + (LOCK_SECONDS if launcher().num_restarts else 0.0)
    with (run_dir / LOCK).open("a+") as file:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in HELD and time.monotonic() < end:
                    time.sleep(1.0)
                    continue
                if error.errno in HELD:
                    file.seek(0)
                    who = file.read().strip() or "a process"
                    raise UserError(
                        f"The run in {run_dir} is alive: {who} computes it.\n"
                        "Let it end, or use resume=null to start another."
                    ) from error
                # Some network file systems have no locks.
            break
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def freeze(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Fill in all values but the run's folder: a copy of it must not name the original."""
    cfg.run_dir = r"\${run_dir}"
    if HydraConfig.initialized():  # ${hydra:runtime.output_dir} is the run's folder as well
        known: Any = HydraConfig.get()
        with read_write(known):
            known.runtime.output_dir = cfg.run_dir
    frozen: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    frozen.run_dir = cfg.run_dir = str(run_dir)
    return frozen  # type: ignore[no-any-return]


def resolved(frozen: DictConfig) -> DictConfig:
    """The same with the folder filled in."""
    return OmegaConf.create(OmegaConf.to_container(frozen, resolve=True))  # type: ignore[return-value]


def save_config(frozen: DictConfig, run_dir: Path) -> None:
    """Write ``config.yaml``; who reads it meanwhile gets the old one or the new one."""
    frozen_files.write_yaml(run_dir / "config.yaml", OmegaConf.to_yaml(frozen))


def load_config(run_dir: Path) -> DictConfig:
    """Read a run's frozen ``config.yaml``, wherever its folder is now.

    Raises:
        UserError: if it is missing, damaged or edited.
    """
    path = run_dir / "config.yaml"
    try:
        frozen: Any = OmegaConf.create(frozen_files.read_yaml(path))
        missing = {"data", "model", "seed", "trainer"} - frozen.keys()
        if missing:
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        frozen.run_dir = str(run_dir)
        resolved(frozen)
    except (
        OmegaConfBaseException,
        YAMLError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(
            f"{path} is not the config of a run: {' '.join(str(error).split())}.\n"
            "Bring it back from a copy, or start another run."
        ) from error
    return frozen  # type: ignore[no-any-return]


def save_words(words: list[str], run_dir: Path) -> None:
    """Write ``overrides.yaml``: when a run was started, and the words that started it."""
    now = datetime.now(UTC).isoformat()
    text = OmegaConf.to_yaml(OmegaConf.create(words))
    frozen_files.write_yaml(run_dir / "overrides.yaml", f"{frozen_files.STARTED}{now}\n{text}")


def load_words(run_dir: Path) -> list[str]:
    """What was typed when a run was started; nothing where that is not known.

    Raises:
        UserError: if it was damaged or edited.
    """
    try:
        return as_typed(frozen_files.read_yaml(run_dir / "overrides.yaml"))
    except (OmegaConfBaseException, YAMLError, OSError, ValueError):
        return []


def as_typed(text: str) -> list[Any]:
    """What a YAML of words has: ``${run_dir}`` in one is no reference into that file."""
    words: list[Any] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    return words


def note_start(run_dir: Path, launchers: Iterable[str]) -> None:
    """Add to ``.starts`` who has started a run, or lets it go on."""
    with (run_dir / STARTS).open("a") as file:
        print(datetime.now(UTC).isoformat(), *sorted(launchers), file=file)


def started_by(run_dir: Path) -> set[str]:
    """The launchers that have started a run."""
    with suppress(OSError, ValueError):
        lines = (run_dir / STARTS).read_text().splitlines()
        return {name for line in lines for name in line.split()[1:]}
    return set()


def results(run_dir: Path) -> dict[str, float]:
    """The last value of every metric; empty where the run has not finished.

    Raises:
        UserError: if it is damaged or edited.
    """
    try:
        found: dict[str, float] = json.loads(frozen_files.read_json(run_dir / "results.json"))
    except (OSError, ValueError):  # damaged, in a run of an older version
        return {}
    return found


def best_checkpoint(run_dir: Path) -> Path:
    """The checkpoint that a run has tested, or the last one of a run that kept no best.

    Raises:
        UserError: if there is none.
    """
    for name in ("best.ckpt", "last.ckpt"):
        if (path := run_dir / "checkpoints" / name).is_file():
            return path
    raise UserError(f"The run in {run_dir} has no checkpoint, which would hold its weights.")


def remove_unused(path: Path) -> None:
    """Remove the folder of a run that was refused before it produced anything."""
    if any((path / name).exists() for name in ("checkpoints", "metrics.csv", "results.json")):
        return
    shutil.rmtree(path, ignore_errors=True)  # a process that ends removes its lock at this time
    if not any(path.parent.iterdir()):
        path.parent.rmdir()


def config_of_checkpoint(checkpoint: Path) -> Path:
    """Where the config of the run that wrote ``checkpoint`` is.

    Raises:
        UserError: if the checkpoint or the config is missing.
    """
    if checkpoint.is_dir():  # of a run, of its checkpoints, or of several runs
        places = ("checkpoints/best.ckpt", "best.ckpt", "*/checkpoints/*", "*/*/checkpoints/*")
        found = [p for place in places for p in checkpoint.glob(place) if p.is_file()]
        best = [path for path in found if path.name == "best.ckpt"]
        newest = max(best, key=lambda path: path.stat().st_mtime, default=None)
        file = newest or "<run>/checkpoints/<name>.ckpt"
        raise UserError(f"checkpoint={checkpoint} is a folder. Use checkpoint={file}")
    if not checkpoint.is_file():
        there = sorted(str(path) for path in checkpoint.parent.glob("*.ckpt"))
        hint = f" There is {', '.join(there)}." if there else ""
        raise UserError(f"checkpoint={checkpoint}: there is no such file.{hint}")
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"checkpoint={checkpoint}: there is no {config}, which says how to build its model.\n"
            "Keep a checkpoint in the checkpoints/ folder of its run."
        )
    return config
