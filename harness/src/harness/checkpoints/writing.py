import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from lightning_fabric.plugins import CheckpointIO

from harness.checkpoints.contents import Contents
from harness.checkpoints.live_objects import put_live_objects
from harness.checkpoints.reading import read
from harness.files import FULL, replacing

log = logging.getLogger(__name__)

PIECE_BYTES = 16 * 2**20
MOST_BYTES = 2**29  # of a checkpoint that wait in memory to be written
Free: TypeAlias = "queue.LifoQueue[bytearray | None]"


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints so that a file of that name is whole, whenever the power goes.

    It is written beside its place and synced, takes its name in one move, and the folder is
    synced. Lightning's own way stages in ``$TMPDIR``, which may be another file system, and
    syncs nothing. A full disk is told, and training goes on: earlier checkpoints stand.
    """

    def __init__(self) -> None:
        self.contents = Contents()
        self.met_full_disk = False  # the last checkpoint found no room
        self.not_written: set[Path] = set()  # that found no room; an older one may have the name
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        # Memory that is kept from one checkpoint to the next, because to get it anew takes as long
        # as a write: the last piece that was given back comes first, and None is one to be made.
        self.free: Free = queue.LifoQueue()
        for _ in range(MOST_BYTES // PIECE_BYTES):
            self.free.put(None)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint in a thread, while training goes on.

        Training waits until the bytes are copied, or, where they are more than ``MOST_BYTES``,
        until the rest of them is on its way. The thread holds Python's lock neither in a write nor
        in a sync. A full disk is told, and leaves nothing behind.

        Args:
            checkpoint: what to write, of which nothing is looked at after this call.
            path: its place.
            storage_options: called when it is safe. Without it this call waits for that.

        Raises:
            UserError: if no run could go on from it.
        """
        self.finish()
        pieces = Pieces(self.free)
        arguments = Path(path), pieces, storage_options
        self.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self.thread.start()
        try:
            self.contents.save(checkpoint, pieces)
            pieces.is_whole = True
        finally:
            pieces.end()
            if storage_options is None:
                self.finish()

    def _write(self, path: Path, pieces: "Pieces", then: Callable[[], None] | None) -> None:
        self.met_full_disk = False
        try:
            with replacing(path) as file:
                write(file, pieces)
            self.not_written.discard(path)
            if then is not None:
                then()
        except UnfinishedError:
            pass  # the thread that trains knows why: serialising has failed there
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                self.met_full_disk = True
                self.not_written.add(path)
                log.error("%s was not written: %s. Free space on its disk.", path, error.strerror)
            else:
                self.error = error
        finally:
            pieces.drain()

    def finish(self) -> None:
        """Wait until the last checkpoint is safe.

        Raises:
            OSError: if it could not be written, though there was room.
        """
        if self.thread is not None:
            self.thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; nothing in it is executed, unless told otherwise."""
        self.finish()
        if weights_only is None or weights_only:
            checkpoint = read(path, map_location)
            if self.contents.trainer is not None:
                put_live_objects(checkpoint, self.contents.trainer)
            return checkpoint
        loaded: dict[str, Any] = torch.load(path, map_location, weights_only=False)
        return loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, which after a resume may be gone already; newer ones are safe."""
        self.finish()
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Leave nothing half written."""
        self.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a spawned process has threads of its own


class Pieces:
    """What is written to this file, cut into pieces of memory that another thread takes.

    Args:
        free: where pieces are taken from and given back to; whoever writes waits for them.
    """

    def __init__(self, free: Free) -> None:
        self.free = free
        self.filled: queue.Queue[tuple[bytearray, int] | None] = queue.Queue()
        self.is_whole = False
        self._begin()

    def _begin(self) -> None:
        self.piece, self.length = self.free.get() or bytearray(PIECE_BYTES), 0

    def write(self, data: Any) -> int:
        """Copy some bytes."""
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            if self.length == PIECE_BYTES:
                self.filled.put((self.piece, self.length))
                self._begin()
            size = min(len(view) - start, PIECE_BYTES - self.length)
            self.piece[self.length : self.length + size] = view[start : start + size]
            start, self.length = start + size, self.length + size
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def end(self) -> None:
        """Nothing more is written."""
        self.filled.put((self.piece, self.length))
        self.filled.put(None)

    def __iter__(self) -> Iterator[memoryview]:
        while (filled := self.filled.get()) is not None:
            piece, length = filled
            try:
                yield memoryview(piece)[:length]
            finally:  # also where the disk has refused it
                self.free.put(piece)
        self.filled.put(None)  # for ``drain``
        if not self.is_whole:
            raise UnfinishedError

    def drain(self) -> None:
        """Take what is left, so that nobody waits for a piece."""
        while (filled := self.filled.get()) is not None:
            self.free.put(filled[0])


class UnfinishedError(Exception):
    """The bytes of a checkpoint have ended early, so its file must not take its name."""


def write(file: BinaryIO, pieces: Iterable[memoryview]) -> None:
    """Write all pieces."""
    file.writelines(pieces)
