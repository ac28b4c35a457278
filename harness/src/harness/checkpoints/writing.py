"""Writes checkpoints: plain ones, durably, while training goes on.

In: what Lightning has collected for a checkpoint. Out: a file that ``torch.load`` reads with its
defaults, whole whenever the power goes. Next: ``reading`` and ``lookup``.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric.plugins import CheckpointIO

from harness.checkpoints.packing import Packer
from harness.checkpoints.reading import ATTRIBUTES, LEFT_OUT, read_to_resume
from harness.display import join_first
from harness.files import DISK_FULL, atomic_write

log = logging.getLogger(__name__)

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
CLASSES = ("hparams_type", "datamodule_hparams_type")  # of the hyper-parameters' containers
SETTINGS_LEFT_OUT = (
    "Checkpoints leave out the hyper-parameters %s, which are not plain: a run that goes on builds "
    "them from its config.\nLists and dicts of numbers and text are kept; "
    "self.save_hyperparameters(ignore=[...]) says so in the code."
)
OBJECTS_LEFT_OUT = (
    "Checkpoints leave out %s: no run can go on from them.\ncheckpoint.trusted=true keeps objects; "
    "going on then executes code that the file names. Or save numbers, text, lists, dicts, arrays "
    "or tensors in on_save_checkpoint and state_dict."
)


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints so that a file of that name is whole, whenever the power goes.

    A checkpoint is written beside its place and synced, takes its name in one move, and the folder
    is synced. Lightning's own way stages in ``$TMPDIR``, which may be another file system, and
    syncs nothing. A full disk is reported, and training goes on with the earlier checkpoints.

    Args:
        is_trusted: keep objects that are not plain, and read them, which executes code of the file.
    """

    def __init__(self, is_trusted: bool = False) -> None:
        self.is_trusted = is_trusted
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self.reported: set[str] = set()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Hand a checkpoint's bytes to the system; a thread syncs them while training goes on.

        ``storage_options`` is called when it is safe; without it this call waits for that.
        """
        self.finish()
        path, content = Path(path), self._plain(checkpoint)
        try:
            with ExitStack() as stack:
                torch.save(content, stack.enter_context(atomic_write(path)))
                syncing = stack.pop_all()
        except Exception as error:
            if not self._is_full(path, error):
                raise
            return
        self.thread = threading.Thread(target=self._sync, args=(path, syncing, storage_options))
        self.thread.start()
        if storage_options is None:
            self.finish()

    def _sync(self, path: Path, syncing: ExitStack, then: Callable[[], None] | None) -> None:
        try:
            syncing.close()  # syncs the file, gives it its name, and syncs the folder
            if then is not None:
                then()
        except Exception as error:
            if not self._is_full(path, error):
                self.error = error

    def _is_full(self, path: Path, error: BaseException) -> bool:
        """Report that the disk has no room, if that is the cause of an error."""
        cause: BaseException | None = error  # torch raises another one while it closes the file
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in DISK_FULL):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return False
        reason = cause.strerror if isinstance(cause, OSError) else cause
        log.error("%s was not written: %s. Free space on its disk.", path, reason)
        return True

    def _plain(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the plain part of a checkpoint; report once what is left out."""
        packer = Packer(keeps_objects=self.is_trusted)
        content: dict[str, Any] = {}
        settings: list[str] = []  # hyper-parameters that are left out
        for key, value in checkpoint.items():
            if key == ATTRIBUTES:
                content[key] = value
            elif key in HYPER_PARAMETERS:
                numbers = {n: v.item() for n, v in value.items() if isinstance(v, np.generic)}
                content[key] = {n: v for n, v in (value | numbers).items() if is_plain(v)}
                settings += [str(name) for name in value if name not in content[key]]
            elif key not in CLASSES:
                content[key] = packer.pack(value, (key,))
        lost = [] if self.is_trusted else packer.objects
        objects = [f"{'.'.join(map(str, place))} ({reason})" for place, reason in lost]
        if objects:
            content[LEFT_OUT] = join_first(objects)
        for names, sentence in ((settings, SETTINGS_LEFT_OUT), (objects, OBJECTS_LEFT_OUT)):
            if not self.reported.issuperset(names):
                log.warning(sentence, join_first(names))
            self.reported |= {*names}
        return content

    def finish(self) -> None:
        """Wait until the last checkpoint is safe.

        Raises:
            OSError: if it could not be written, though there was room.
        """
        if self.thread is not None:
            self.thread.join()
        self.thread = None
        if error := self.error:
            self.error = None
            raise error

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU; nothing in it is executed, unless the run trusts it."""
        self.finish()
        return read_to_resume(Path(path), map_location, self.is_trusted)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, which after a resume may be gone already; newer ones are safe."""
        self.finish()
        Path(path).unlink(missing_ok=True)

    teardown = finish


def is_plain(value: Any) -> bool:
    """Return whether torch's plain reader gives a value back as it is."""
    packer = Packer()
    packer.pack(value)
    return not (packer.num_marked or packer.objects)
