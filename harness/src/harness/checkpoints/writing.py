"""Write plain checkpoints durably, in a thread.

In: the dict that Lightning has collected for a checkpoint. Out: a file that ``torch.load`` reads
with its defaults, and that is complete even after a power failure. Next: ``reading`` and
``lookup``.
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
CLASSES = ("hparams_type", "datamodule_hparams_type")  # classes of the hyper-parameters' containers
SETTINGS_LEFT_OUT = (
    "Checkpoints leave out the hyper-parameters %s. A resumed run builds them from its config.\n"
    "Use numbers, text, and lists and dicts of these. Exclude other hyper-parameters with "
    "self.save_hyperparameters(ignore=[...]). If your code reads them, as in "
    "self.hparams.optimizer, leave them as they are."
)
OBJECTS_LEFT_OUT = (
    "Checkpoints leave out %s. No run can resume from these checkpoints.\nSave numbers, text, "
    "lists, dicts, arrays or tensors in on_save_checkpoint and state_dict. Or save other objects "
    "with checkpoint.trusted=true: resuming then executes code that the checkpoint names."
)


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints atomically: a power failure leaves a complete file or none of that name.

    It writes a partial file in the same folder, syncs the file, renames it, and syncs the folder.
    Lightning would write to ``$TMPDIR``, maybe on another file system, and sync nothing. If the
    disk is full, it logs an error, and the training continues with the earlier checkpoints.

    Args:
        is_trusted: also save and load objects that are not plain. Loading them executes code
            that the file names.
    """

    def __init__(self, is_trusted: bool = False) -> None:
        self.is_trusted = is_trusted
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self.reported: set[str] = set()  # names in earlier warnings

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; a thread syncs the file while the training continues.

        ``storage_options`` is a function that the thread calls once the file is safe. Without it,
        this method waits until the file is safe.
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

    def _sync(self, path: Path, syncing: ExitStack, on_safe: Callable[[], None] | None) -> None:
        try:
            syncing.close()  # syncs the file, renames it, and syncs the folder
            if on_safe is not None:
                on_safe()
        except Exception as error:
            if not self._is_full(path, error):
                self.error = error

    def _is_full(self, path: Path, error: BaseException) -> bool:
        """Return whether a full disk caused an error, and log it if so."""
        cause: BaseException | None = error  # torch raises another error while it closes the file
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in DISK_FULL):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return False
        reason = cause.strerror if isinstance(cause, OSError) else cause
        log.error("%s was not written: %s. Free space on its disk.", path, reason)
        return True

    def _plain(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the plain entries of a checkpoint; warn once of all others."""
        packer = Packer(keeps_objects=self.is_trusted)
        content: dict[str, Any] = {}
        settings: list[str] = []  # names of hyper-parameters that are left out
        for key, value in checkpoint.items():
            if key == ATTRIBUTES:
                content[key] = value
            elif key in HYPER_PARAMETERS:
                numbers = {n: v.item() for n, v in value.items() if isinstance(v, np.generic)}
                content[key] = {n: v for n, v in (value | numbers).items() if is_plain(v)}
                settings += [str(name) for name in value if name not in content[key]]
            elif key not in CLASSES:
                content[key] = packer.pack(value, (key,))
        left_out = [] if self.is_trusted else packer.objects
        objects = [f"{'.'.join(map(str, keys))} ({reason})" for keys, reason in left_out]
        if objects:
            content[LEFT_OUT] = join_first(objects)
        for names, message in ((settings, SETTINGS_LEFT_OUT), (objects, OBJECTS_LEFT_OUT)):
            if not self.reported.issuperset(names):
                log.warning(message, join_first(names))
            self.reported |= {*names}
        return content

    def finish(self) -> None:
        """Wait until the last checkpoint is safe.

        Raises:
            OSError: the checkpoint was not written, and a full disk is not the reason.
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
        """Read a checkpoint to the CPU; execute code that it names only with ``is_trusted``."""
        self.finish()
        return read_to_resume(Path(path), map_location, self.is_trusted)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint once newer ones are safe. After a resume, its file may be missing."""
        self.finish()
        Path(path).unlink(missing_ok=True)

    teardown = finish


def is_plain(value: Any) -> bool:
    """Return whether ``torch.load(weights_only=True)`` returns a value unchanged."""
    packer = Packer()
    packer.pack(value)
    return not (packer.num_marked or packer.objects)
