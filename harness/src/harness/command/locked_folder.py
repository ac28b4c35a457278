"""A folder that one run has for itself: made, locked, and removed where nothing came of it."""

import errno
import fcntl
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.errors import UserError
from harness.files import FULL
from harness.processes.launch import global_rank
from harness.processes.launcher import launcher
from harness.record import NEXT

LOCK = ".lock"
HELD = (errno.EAGAIN, errno.EACCES)  # by another process
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
    parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    except UserError:
        remove_empty(parent)
        raise
    finally:
        os.close(folder)


@contextmanager
def writable(parent: Path) -> Iterator[None]:
    """Say in a sentence where the system does not let a run write.

    Args:
        parent: of the run's folder.

    Raises:
        UserError: with what to do.
    """
    try:
        yield
    except OSError as error:
        place = Path(os.path.abspath(str(error.filename)))
        if not (place.is_relative_to(parent.absolute()) or parent.absolute().is_relative_to(place)):
            raise
        if error.errno in FULL:
            then = "Free space on its disk; a run goes on with resume=auto"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            then = (
                "Choose a folder that you may write to with output_dir=<folder>; a run that goes "
                "on may be copied there: resume=<copy>"
            )
        else:
            raise
        raise UserError(f"{error.filename} was not written: {error.strerror}.\n{then}.") from error


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
    end = time.monotonic() + (LOCK_SECONDS if launcher().is_again else 0.0)
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


def remove_unused(run_dir: Path, is_own: bool = True) -> None:
    """Remove what a refused command has made: its run's folder, or the next config of another run.

    Args:
        run_dir: the folder.
        is_own: whether the command, and no sweep, has made the folder if it is new.
    """
    is_old = (run_dir / NEXT).exists()
    (run_dir / NEXT).unlink(missing_ok=True)
    traces = ("checkpoints", "metrics.csv", "results.json")
    if is_old or not is_own or any((run_dir / name).exists() for name in traces):
        return
    shutil.rmtree(run_dir, ignore_errors=True)  # a process that ends removes its lock at this time
    remove_empty(run_dir.parent)


def remove_empty(parent: Path) -> None:
    """Remove a folder of runs that has none."""
    with suppress(OSError):  # there is something in it
        parent.rmdir()
