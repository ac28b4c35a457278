import errno
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from lightning_fabric.plugins import CheckpointIO

from harness.checkpoints.lookup import damage
from harness.files import replacing

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
EARLY_BYTES = PIECE_BYTES = 16 * 2**20
MOST_BYTES = 2**29  # of a checkpoint that wait in memory to be written


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
        self.was_full = False
        self.writing: Writing | None = None
        self.pieces = Pieces()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; a full disk is told, and leaves nothing behind.

        Args:
            checkpoint: what to write, of which nothing is looked at after this call.
            path: its place.
            storage_options: called when it is safe. Without it this call waits for that.
        """
        self.finish()
        self.was_full |= self.met_full_disk
        self.writing = Writing(Path(path), storage_options, self.pieces)
        try:
            self.writing.take(checkpoint)
        finally:
            if storage_options is None:
                self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is safe.

        Raises:
            OSError: if it could not be written, though there was room.
        """
        if self.writing is not None:
            self.writing.thread.join()
            error, self.writing.error = self.writing.error, None
            if error is not None and not self.writing.met_full_disk:
                raise error

    @property
    def must_stop(self) -> bool:
        """Whether a full disk has been met which is to end the run."""
        return self.on_full_disk == "stop" and (self.was_full or self.met_full_disk)

    @property
    def met_full_disk(self) -> bool:
        """Whether the last checkpoint found no room."""
        return self.writing is not None and self.writing.met_full_disk

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; plain values only, unless told otherwise."""
        self.finish()
        plain = weights_only is None or weights_only
        checkpoint: dict[str, Any] = torch.load(path, map_location, weights_only=plain)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, which after a resume may be gone already; newer ones are safe."""
        self.finish()
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Leave nothing half written."""
        self.finish()

    def __getstate__(self) -> dict[str, Any]:
        return {"on_full_disk": self.on_full_disk}  # a spawned process has threads of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def unreadable(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; also where torch is stricter than its checksums."""
    reason = damage(path)
    if reason is None:
        try:
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # whatever torch makes of a flipped bit
            reason = str(error).partition("\n")[0]
    return reason


class Pieces:
    """Memory that is kept from one checkpoint to the next: to get it anew takes as long as a write.

    It is as large as a checkpoint, up to a limit.
    """

    def __init__(self) -> None:
        self.free: queue.Queue[bytearray] = queue.Queue()
        self.num_made = 0

    def take(self) -> bytearray:
        """A piece that is free, or the next one that will be."""
        if self.free.empty() and self.num_made < MOST_BYTES // PIECE_BYTES:
            self.num_made += 1
            return bytearray(PIECE_BYTES)
        return self.free.get()


class Writing:
    """Write a checkpoint in a thread, while training goes on.

    Training waits until the bytes are copied, or, where they are more than the pieces hold, until
    the rest of them is on its way. The thread holds Python's lock neither in a write nor in a
    sync.

    Args:
        path: the checkpoint's place, which it takes when it is whole and synced.
        then: called when it is safe.
        pieces: where bytes wait.
    """

    def __init__(self, path: Path, then: Callable[[], None] | None, pieces: Pieces) -> None:
        self.path, self.then, self.pieces = path, then, pieces
        self.filled: queue.Queue[tuple[bytearray, int] | None] = queue.Queue()
        self.piece, self.length = pieces.take(), 0  # being filled
        self.is_whole = self.is_drained = self.met_full_disk = False
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="checkpoint")
        self.thread.start()

    def take(self, checkpoint: dict[str, Any]) -> None:
        """Serialise for the thread; after this the values may change."""
        try:
            torch.save(checkpoint, self)  # type: ignore[arg-type]  # writes are enough
            self.is_whole = True
        finally:
            self.filled.put((self.piece, self.length))
            self.filled.put(None)

    def write(self, data: Any) -> int:
        """Copy some bytes."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            if self.length == PIECE_BYTES:
                self.filled.put((self.piece, self.length))
                self.piece, self.length = self.pieces.take(), 0
            size = min(len(view) - start, PIECE_BYTES - self.length)
            self.piece[self.length : self.length + size] = view[start : start + size]
            start, self.length = start + size, self.length + size
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def _taken(self) -> Iterator[memoryview]:
        for piece, length in iter(self.filled.get, None):
            try:
                yield memoryview(piece)[:length]
            finally:  # also where the disk has refused it
                self.pieces.free.put(piece)
        self.is_drained = True

    def _run(self) -> None:
        try:
            with replacing(self.path) as file:
                write(file, self._taken())
                if not self.is_whole:
                    raise UnfinishedError
            if self.then is not None:
                self.then()
        except UnfinishedError:
            pass  # the thread that trains knows why: serialising has failed there
        except Exception as error:  # raised in the thread that trains; see finish()
            self.error = error
            if isinstance(error, OSError) and error.errno in FULL:
                self.met_full_disk = True
                log.error(
                    "%s was not written: %s. Free space on its disk.", self.path, error.strerror
                )
        if not self.is_drained:
            for _ in self._taken():
                pass  # training must not wait for a piece


class UnfinishedError(Exception):
    """The bytes of a checkpoint have ended early, so its file must not take its name."""


def write(file: BinaryIO, pieces: Iterable[memoryview]) -> None:
    """Write pieces, and let the disk begin while the rest is still to come."""
    written = announced = 0
    for piece in pieces:
        file.write(piece)
        written += len(piece)
        if written - announced >= EARLY_BYTES and hasattr(os, "posix_fadvise"):
            file.flush()
            advice = os.POSIX_FADV_DONTNEED  # starts to write, and waits for nothing
            os.posix_fadvise(file.fileno(), announced, written - announced, advice)
            announced = written
