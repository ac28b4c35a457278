import errno
import logging
import os
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric.plugins import CheckpointIO

from project.checkpoints.files import PART, damage, sync

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
EARLY_BYTES = 16 * 2**20


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints so that a file of that name is whole, whenever the power goes.

    It is written beside its place and synced, takes its name in one move, and the folder is
    synced. Lightning's own way stages in ``$TMPDIR``, which may be another file system, and
    syncs nothing.

    Args:
        on_full_disk: ``"continue"`` says so and trains on, ``"stop"`` says so and ends the run
            at the next safe point. Earlier checkpoints stand in both cases.
    """

    def __init__(self, on_full_disk: Literal["continue", "stop"] = "continue") -> None:
        self.on_full_disk = on_full_disk
        self.full_disk: str | None = None  # what to say, from a failed write to the next good one

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; a full disk is told, and leaves nothing behind."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}{PART}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb", buffering=0) as file:
                write(checkpoint, file)
            part.replace(path)
            sync(path.parent)
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno not in FULL:
                raise
            self.full_disk = f"{path} was not written: {error.strerror}. Free space on its disk."
            log.error(self.full_disk)
        else:
            self.full_disk = None

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; plain values only, unless told otherwise."""
        plain = weights_only is None or weights_only
        checkpoint: dict[str, Any] = torch.load(path, map_location, weights_only=plain)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint; after a resume it may be gone already."""
        Path(path).unlink(missing_ok=True)


def unreadable(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; also where torch is stricter than its checksums."""
    reason = damage(path)
    if reason is None:
        try:
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # whatever torch makes of a flipped bit
            reason = str(error).partition("\n")[0]
    return reason


class EarlyWriting:
    """Let the disk write what is there while the rest is still being serialised.

    Else all of it would wait for the sync, and training with it.
    """

    def __init__(self, file: FileIO) -> None:
        self.file, self.written, self.announced = file, 0, 0

    def write(self, data: Any) -> int:
        """Write a piece; every few megabytes, ask the system to begin."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):  # the system takes at most 2 GiB at once
            start += self.file.write(view[start : start + EARLY_BYTES]) or 0
            self._begin(self.written + start)
        self.written += start
        return start

    def _begin(self, end: int) -> None:
        length = end - self.announced
        if length >= EARLY_BYTES and hasattr(os, "posix_fadvise"):
            advice = os.POSIX_FADV_DONTNEED  # starts to write, and waits for nothing
            os.posix_fadvise(self.file.fileno(), self.announced, length, advice)
            self.announced = end

    def flush(self) -> None:
        """Nothing is held back."""


def write(checkpoint: dict[str, Any], file: FileIO) -> None:
    """Serialise into an open file and sync it; raises ``OSError`` where torch hides one."""
    try:
        torch.save(checkpoint, EarlyWriting(file))  # type: ignore[arg-type]  # writes are enough
    except RuntimeError as error:
        cause = error.__context__ if error.__cause__ is None else error.__cause__
        if isinstance(cause, OSError):
            raise cause from error
        raise
    os.fsync(file.fileno())
