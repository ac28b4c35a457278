"""A run's folder: create it, lock it, read and write its config, overrides and results.

In: a folder. Out: the contents of its files, or a ``UserError`` that names the file. ``choose_run``
decides which folder. This module imports no torch, so that errors appear at once.
"""

import errno
import fcntl
import itertools
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.display import display_path
from harness.distributed.launcher import global_rank, launcher
from harness.errors import UserError
from harness.files import MAX_YAML, read_bytes, read_yaml, refuse_links, write_yaml
from harness.provenance import PENDING_CONFIG
from harness.untrusted import check_yaml, parse_yaml, read_json

STARTED = "# started "  # begins a line of overrides.yaml
LOCK = ".lock"
LOCK_SECONDS = 120.0  # a network disk may keep the lock of a dead machine for this long
UNREADABLE = (OmegaConfBaseException, YAMLError, OSError, LookupError, TypeError, ValueError)


def freeze(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Resolve all interpolations except ``${run_dir}``, so that the run's folder may be moved."""
    cfg.run_dir = r"\${run_dir}"
    frozen: Any = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    frozen.run_dir = cfg.run_dir = str(run_dir)
    return frozen  # type: ignore[no-any-return]


def resolved(frozen: DictConfig) -> DictConfig:
    """Resolve ``${run_dir}`` in a frozen config as well."""
    return OmegaConf.create(OmegaConf.to_container(frozen, resolve=True))  # type: ignore[return-value]


def save_config(frozen: DictConfig, run_dir: Path, name: str = "config.yaml") -> None:
    """Replace a run's config atomically.

    Raises:
        UserError: if it is larger than ``load_config`` accepts.
    """
    text = OmegaConf.to_yaml(frozen)
    try:
        check_yaml(text.encode())
    except ValueError as error:
        raise UserError(
            f"The config is too large to be saved with the run: {error}.\n"
            "Write long lists to a data file, and put its path into the config."
        ) from error
    write_yaml(run_dir / name, text)


def load_current_config(run_dir: Path) -> DictConfig:
    """Return the config of a starting or resuming run, for the ranks that rank 0 has started."""
    is_pending = (run_dir / PENDING_CONFIG).exists()
    return load_config(run_dir, PENDING_CONFIG if is_pending else "config.yaml")


def load_config(run_dir: Path, name: str = "config.yaml") -> DictConfig:
    """Return a run's frozen config, with its folder's present path; a UserError if damaged."""
    path = run_dir / name
    try:
        node = parse_yaml(read_yaml(path).encode())
        check_frozen(node)
        frozen: Any = OmegaConf.create(node)
        if missing := {"data", "model", "seed", "trainer"} - frozen.keys():
            raise ValueError(f"it has no {' and no '.join(sorted(missing))}")
        frozen.run_dir = str(run_dir)
        resolved(frozen)
    except UNREADABLE as error:
        raise UserError(
            f"{path} is not the config of a run: {' '.join(str(error).split())}.\n"
            "Restore it from a backup, or start another run."
        ) from error
    return frozen  # type: ignore[no-any-return]


def check_frozen(node: Any) -> None:
    """Raise a ValueError if a frozen config has any interpolation except ``${run_dir}``.

    ``freeze`` resolves all others, so no run has written ``${oc.env:TOKEN}`` into its config.
    """
    if isinstance(node, str) and "${" in node.replace("${run_dir}", ""):
        raise ValueError(f"{node} is not replaced by a value")
    values = node.values() if isinstance(node, dict) else node
    for child in values if isinstance(node, dict | list) else ():
        check_frozen(child)


def save_overrides(overrides: list[str], run_dir: Path) -> None:
    """Write ``overrides.yaml``: the time of a run's start, and the overrides of its command."""
    started = f"{STARTED}{datetime.now(UTC).isoformat()}\n"
    text = OmegaConf.to_yaml(OmegaConf.create(overrides))
    write_yaml(run_dir / "overrides.yaml", started + text)


def load_overrides(run_dir: Path) -> list[str]:
    """Return the overrides that started a run, as typed; ``[]`` without a readable file."""
    try:
        overrides = parse_yaml(read_yaml(run_dir / "overrides.yaml").encode())
    except UNREADABLE:
        return []
    return overrides if isinstance(overrides, list) and {*map(type, overrides)} <= {str} else []


def results(run_dir: Path) -> dict[str, float]:
    """Return the last value of every metric; ``{}`` while the run has not finished."""
    try:
        values: dict[str, float | None] = read_json(run_dir / "results.json")
        if {*map(type, values.values())} - {float, int, bool, type(None)}:
            raise ValueError("it holds more than numbers")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{run_dir / 'results.json'} is damaged: {error}.\nRemove the file, and test again: "
            f"python train.py resume={display_path(run_dir)}"
        ) from error
    return {name: math.nan if value is None else value for name, value in values.items()}


def is_run(folder: Path) -> bool:
    """Return whether a folder is the folder of a run."""
    return any((folder / name).exists() for name in ("config.yaml", "overrides.yaml"))


def runs_in(parent: Path) -> list[Path]:
    """Return the folders of the runs in a folder, in the order of their starts."""
    return sorted((path.parent.resolve() for path in parent.glob("*/overrides.yaml")), key=_started)


def _started(run_dir: Path) -> str:
    """Return the start of a run from overrides.yaml, because a copy of a file has another time."""
    with suppress(OSError, ValueError):
        text = read_bytes(run_dir / "overrides.yaml", MAX_YAML).decode(errors="replace")
        if line := re.search(f"^{STARTED}(.+)$", text, re.MULTILINE):
            return line[1]
    return ""


def config_of_checkpoint(checkpoint: Path) -> Path:
    """Return the path of the config of a checkpoint's run; a UserError if either is missing."""
    if not checkpoint.is_file():
        raise UserError(
            f"checkpoint={checkpoint} is not a file. Use checkpoint=<run>, a run's folder, or one "
            "of its checkpoints, <run>/checkpoints/best.ckpt"
        )
    config = checkpoint.resolve().parent.parent / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"checkpoint={checkpoint} needs the config of its run, but {config} does not exist.\n"
            "Keep it in the checkpoints/ folder of its run. To make a run of another file:\n"
            f"python train.py <overrides> init={checkpoint} trainer.max_epochs=0"
        )
    for run_dir in {config.parent, checkpoint.absolute().parent.parent}:
        if is_run(run_dir):
            refuse_links(run_dir)
    return config


def make(parent: Path, name: str | None = None) -> Path:
    """Create a run's folder, named by the time by default; a number makes the name unique."""
    stem = name or time.strftime("%Y-%m-%d_%H-%M-%S")
    with _writing():
        parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            path = parent / (stem if attempt == 1 else f"{stem}.{attempt}")
            with suppress(FileExistsError):
                path.mkdir()
                break
    return path.resolve()


@contextmanager
def choosing(parent: Path) -> Iterator[None]:
    """Lock a folder of runs in the block, and remove the folder afterwards if it is empty."""
    with _writing():
        parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # the folder has runs
            parent.rmdir()


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock a run's folder against other commands. The system releases the lock with the process.

    Only rank 0 locks the folder.

    Raises:
        UserError: another process holds the lock; the message names the process.
    """
    if global_rank() > 0:
        yield
        return
    refuse_links(run_dir)
    end = time.monotonic() + (LOCK_SECONDS if launcher().may_be_restart else 0.0)
    with _writing():
        file = (run_dir / LOCK).open("a+")
    with file:
        while not _try_lock(file.fileno()):
            if time.monotonic() > end:
                file.seek(0)
                raise UserError(
                    f"The run in {run_dir} is running in {file.read().strip() or 'a process'}.\n"
                    "Wait until it ends, or use resume=null to start another."
                )
            time.sleep(1.0)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def _try_lock(descriptor: int) -> bool:
    """Return ``False`` if another process holds the lock, ``True`` on a disk without locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


@contextmanager
def _writing() -> Iterator[None]:
    """Turn an OSError in the block, which writes files, into a ``UserError``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename} was not written: {error.strerror}.\nChoose another folder with "
            "output_dir=<folder>, or copy the run there: resume=<copy>."
        ) from error


def remove_unused(run_dir: Path, is_own: bool = True) -> None:
    """Remove the files of a command that stopped with an error before it trained.

    These are its new folder, or the pending config of a resumed run. A job of a sweep keeps its
    folder (``is_own=False``), because the sweep created it.
    """
    is_old = (run_dir / PENDING_CONFIG).exists()
    (run_dir / PENDING_CONFIG).unlink(missing_ok=True)
    traces = ("checkpoints", "metrics.csv", "results.json")
    if is_own and not is_old and not any((run_dir / name).exists() for name in traces):
        shutil.rmtree(run_dir, ignore_errors=True)
        with suppress(OSError):  # the parent has other runs
            run_dir.parent.rmdir()
