"""The one folder of a run, shared by all its processes."""

import errno
import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.command import aliases
from harness.errors import UserError
from harness.files import write_durably
from harness.processes.launch import global_rank

LOCK = ".lock"


def choose(parent: Path, num_nodes: int = 1) -> Path:
    """Return the run's folder below ``parent``; the first process makes it.

    Args:
        parent: where runs of this kind go.
        num_nodes: machines of the run.

    Raises:
        UserError: if the folder cannot be made.
    """
    if "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        # Every task knows the job, so no task needs to tell the others. A job that was put back
        # in the queue keeps its number and finds its folder again.
        path = parent / f"slurm_{os.environ['SLURM_JOB_ID']}"
        if global_rank() == 0:
            with _making(parent):
                path.mkdir(parents=True, exist_ok=True)
        return path
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        return _agree("env://", parent)
    if num_nodes > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        return _agree(address, parent, rank=global_rank(), world_size=num_nodes)
    return make(parent)


def make(parent: Path) -> Path:
    """Make a folder named by the time; runs of the same second get different ones."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    attempt = 1
    with _making(parent):
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = parent / (stamp if attempt == 1 else f"{stamp}_{attempt}")
            with suppress(FileExistsError):
                path.mkdir()
                return path.resolve()
            attempt += 1


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
    with (run_dir / LOCK).open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                file.seek(0)
                raise UserError(
                    f"The run in {run_dir} is alive: {file.read().strip() or 'a process'} computes "
                    "it.\nLet it end, or leave out resume= to start another."
                ) from error
            # Some network file systems have no locks.
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
    write_durably(run_dir / "config.yaml", OmegaConf.to_yaml(frozen).encode())


def load_config(run_dir: Path) -> DictConfig:
    """Read a run's frozen ``config.yaml``, wherever its folder is now.

    Raises:
        UserError: if it is missing or damaged.
    """
    path = run_dir / "config.yaml"
    try:
        whole = OmegaConf.to_container(OmegaConf.load(path))
        frozen: Any = OmegaConf.create(aliases.renamed(whole))
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


def results(run_dir: Path) -> dict[str, float]:
    """The last value of every metric; empty where the run has not finished."""
    try:
        found: dict[str, float] = json.loads((run_dir / "results.json").read_text())
    except (OSError, ValueError):  # damaged, and what it says is in metrics.csv
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


def sweeps(overrides: list[str]) -> Path:
    """Where a command's sweeps go, as conf/command.yaml says."""
    given = dict(override.partition("=")[::2] for override in overrides)
    return Path(given.get("output_dir", "outputs"), "sweeps")


def remove_unstarted(folder: Path) -> None:
    """Remove the folder of a sweep in which no run has started."""
    if folder.is_dir() and not any(folder.glob("*/config.yaml")):
        shutil.rmtree(folder, ignore_errors=True)
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()


def config_of_checkpoint(checkpoint: Path) -> Path:
    """Where the config of the run that wrote ``checkpoint`` is.

    Raises:
        UserError: if the checkpoint or the config is missing.
    """
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


def _agree(address: str, parent: Path, **ranks: int) -> Path:
    """Let the first process choose, and the others read its choice from the launcher's store."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous(address, **ranks))
    key = f"run_folder/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(key, str(make(parent)))
    path = Path(store.get(key).decode())
    # The first process may own the store, which ends with this call: it waits for its readers.
    store.add(f"{key}/readers", 1)
    while rank == 0 and store.add(f"{key}/readers", 0) < world_size:
        time.sleep(0.01)
    return path
