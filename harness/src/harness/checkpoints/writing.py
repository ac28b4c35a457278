"""Writes checkpoints: plain ones, durably, while training goes on.

In: what Lightning has collected for a checkpoint. Out: a file that ``torch.load`` reads with its
defaults, whole whenever the power goes. Next: ``reading`` and ``lookup``.
"""

import logging
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric.plugins import CheckpointIO

from harness.checkpoints.plain import Packer, class_name
from harness.checkpoints.reading import ATTRIBUTES, LEFT_OUT, read_to_resume
from harness.errors import UserError
from harness.files import FULL, replacing
from harness.names import few

log = logging.getLogger(__name__)

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
CLASSES = ("hparams_type", "datamodule_hparams_type")  # of the hyper-parameters' containers


class ObjectPacker(Packer):
    """Packs a checkpoint, and notes what in it is not plain.

    Args:
        keeps: leave such objects where they are; they are replaced by ``None`` otherwise.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps, self.objects = keeps, list[str]()

    def other(self, value: Any, place: tuple[Any, ...]) -> Any:
        """Note an object."""
        keys = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in place]
        self.objects.append(f"{''.join(keys).removeprefix('.')} ({class_name(value)})")
        return value if self.keeps else None


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints so that a file of that name is whole, whenever the power goes.

    It is written beside its place and synced, takes its name in one move, and the folder is
    synced. Lightning's own way stages in ``$TMPDIR``, which may be another file system, and
    syncs nothing. A full disk is told, and training goes on: earlier checkpoints stand.

    Args:
        is_trusted: keep objects that are not plain, and read them: this executes code of the file.
    """

    def __init__(self, is_trusted: bool = False) -> None:
        self.is_trusted = is_trusted
        self.met_full_disk = False  # the last checkpoint found no room
        self.not_written: set[Path] = set()  # that found no room; an older one may have the name
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self.told: set[str] = set()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; a thread syncs it while training goes on.

        Training waits until the system has taken the bytes, and not until they are on the disk.

        Args:
            checkpoint: what to write, of which nothing is looked at after this call.
            path: its place.
            storage_options: called when it is safe. Without it this call waits for that.

        Raises:
            UserError: if an object of a trusted checkpoint cannot be pickled.
        """
        self.finish()
        path, content = Path(path), self.prepared(checkpoint)
        self.met_full_disk = False
        try:
            with ExitStack() as stack:
                write(content, stack.enter_context(replacing(path)))
                syncing = stack.pop_all()
        except Exception as error:
            if not self._is_full(path, error):
                raise
            return
        arguments = path, syncing, storage_options
        self.thread = threading.Thread(target=self._sync, args=arguments, name="checkpoint")
        self.thread.start()
        if storage_options is None:
            self.finish()

    def _sync(self, path: Path, syncing: ExitStack, then: Callable[[], None] | None) -> None:
        try:
            syncing.close()  # syncs the file, gives it its name, and syncs the folder
            self.not_written.discard(path)
            if then is not None:
                then()
        except Exception as error:
            if not self._is_full(path, error):
                self.error = error

    def _is_full(self, path: Path, error: BaseException) -> bool:
        """Say that the disk has no room, if that is the cause of an error."""
        cause: BaseException | None = error  # torch raises another one while it closes the file
        while cause is not None and not (isinstance(cause, OSError) and cause.errno in FULL):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            return False
        self.met_full_disk = True
        self.not_written.add(path)
        reason = cause.strerror if isinstance(cause, OSError) else cause
        log.error("%s was not written: %s. Free space on its disk.", path, reason)
        return True

    def prepared(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What is written of a checkpoint; what is not plain is left out, and told once."""
        packer = ObjectPacker(self.is_trusted)
        content: dict[str, Any] = {}
        left_out: list[str] = []
        for key, value in checkpoint.items():
            if key in (*HYPER_PARAMETERS, *CLASSES) and not self.is_trusted:
                if key in HYPER_PARAMETERS:
                    content[key], odd = plain_settings(value)
                    left_out += [f"{key}.{name}" for name in odd]
            else:
                is_ours = key in (ATTRIBUTES, *HYPER_PARAMETERS, *CLASSES)
                content[key] = value if is_ours else packer.pack(value, (key,))
        if left_out := [name for name in left_out if name not in self.told]:
            names = [name.partition(".")[2] for name in left_out]
            log.warning(
                "Checkpoints leave out %s, which is not plain; a run that goes on builds it from "
                "its config.\nself.save_hyperparameters(ignore=%s) says so in the code.",
                few(left_out),
                names,
            )
        if packer.objects and not self.is_trusted:
            content[LEFT_OUT] = few(packer.objects)
            if not self.told.issuperset(packer.objects):
                log.warning(
                    "Checkpoints leave out %s: no run can go on from them.\nSave numbers, text, "
                    "lists, dicts, arrays or tensors instead, or set checkpoint.trusted=true, "
                    "which keeps objects; to read them executes code of the file.",
                    content[LEFT_OUT],
                )
        self.told |= {*left_out, *packer.objects}
        return content

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
        """Read a checkpoint to the CPU; nothing in it is executed, unless it is trusted."""
        self.finish()
        return read_to_resume(Path(path), map_location, self.is_trusted)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, which after a resume may be gone already; newer ones are safe."""
        self.finish()
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Leave nothing half written."""
        self.finish()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.is_trusted,)  # a spawned process has threads of its own


def plain_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The hyper-parameters that torch's plain reader gives back as they are, and other names."""
    kept: dict[str, Any] = {}
    odd: list[str] = []
    for name, value in settings.items():
        value = value.item() if isinstance(value, np.generic) else value
        packer = ObjectPacker(keeps=True)
        if packer.pack(value) is value and not packer.objects:
            kept[name] = value
        else:
            odd.append(str(name))
    return kept, odd


def write(content: dict[str, Any], file: Any) -> None:
    """Write what is prepared.

    Raises:
        UserError: an object of it, which only a trusted checkpoint has, cannot be pickled.
    """
    try:
        torch.save(content, file)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UserError(
            f"checkpoint.trusted=true keeps objects as they are, and one cannot be pickled: "
            f"{error}.\nSave numbers, text, lists, dicts, arrays or tensors in its place."
        ) from error
