"""Read checkpoints; only a run that resumes with ``checkpoint.trusted=true`` executes their code.

In: a file that ``writing`` wrote. Out: its values, or the reason why no run can resume from it.
"""

import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from harness.checkpoints.lookup import by_step, damage
from harness.checkpoints.packing import Unpacker
from harness.errors import UserError

FORMAT = 4  # version of the entries that resuming needs; increased when they change
ATTRIBUTES = "changed_attributes"  # the entry that ``attributes`` packs and unpacks
LEFT_OUT = "left_out"  # the entry that names objects that were not saved: no run can resume


def read(path: str | Path, map_location: Any = "cpu", is_trusted: bool = False) -> dict[str, Any]:
    """Map a checkpoint into memory, and return its entries.

    A tensor on the CPU is read from the file at its first use. All ranks of a machine share this
    memory. A write to a tensor does not change the file. If the file is removed, its disk space
    becomes free with the last tensor.

    Args:
        path: the checkpoint.
        map_location: as in ``torch.load``.
        is_trusted: build objects in the file, which executes code that the file names.

    Raises:
        UnpicklingError: the file cannot be read, is no checkpoint of a training, or holds objects.
        OSError: the system cannot read the file.
        RuntimeError: the file is cut off, or ``torch.save`` did not write it.
    """
    try:
        is_mappable = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip
        found = torch.load(path, map_location, weights_only=not is_trusted, mmap=is_mappable)
    except (OSError, RuntimeError, MemoryError, UnpicklingError):
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise UnpicklingError(f"its pickle cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise UnpicklingError(f"it holds a {type(found).__name__}, not the state of a training")
    unpack = Unpacker().unpack
    return {key: value if key == ATTRIBUTES else unpack(value) for key, value in found.items()}


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Return a checkpoint's weights, and the attributes that training changed.

    The attributes are ``None`` if the checkpoint has none. They are also ``None`` if the checkpoint
    holds objects: then only its weights are read, and no object is built.

    Raises:
        KeyError: the checkpoint holds no weights.
        UnpicklingError, OSError, RuntimeError: see ``read``.
    """
    try:
        found = read(path)
        return found["state_dict"], found.get(ATTRIBUTES)
    except UnpicklingError:
        if not holds_objects(path):
            raise
    from harness import convert  # only checkpoints with objects need it

    try:
        return convert.load(path, key="state_dict", prefix="", ema=False), None
    except convert.CheckpointError as error:
        raise UnpicklingError(str(error)) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a checkpoint's weights; it raises the errors of ``read_model``."""
    return read_model(path)[0]


def holds_objects(path: Path) -> bool:
    """Return whether a readable checkpoint holds objects, which only code can build."""
    try:
        return bool(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # its pickle is damaged
        return False


def unreadable(path: Path) -> str | None:
    """Return why a checkpoint cannot be read (its damage, or torch's error), or ``None``."""
    reason = damage(path)
    if reason is None:
        try:
            read(path)
        except Exception as error:  # a flipped bit may raise any exception
            if not holds_objects(path):
                reason = str(error).partition("\n")[0]
    return reason


def newest_intact(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is intact, and a message for each newer, damaged one."""
    skipped: list[str] = []
    for path in reversed(by_step(folder)):
        reason = unreadable(path)
        if reason is None:
            return path, skipped
        skipped.append(f"{path} is damaged and was skipped: {reason}.")
    return None, skipped


def read_to_resume(path: Path, map_location: Any, is_trusted: bool) -> dict[str, Any]:
    """Read a checkpoint from which a run resumes.

    Raises:
        UserError: an object was not saved, the file holds objects that only code can build, or
            another version of the library wrote it.
    """
    advice = f"Start another run from its weights with init={path}."
    try:
        checkpoint = read(path, map_location, is_trusted=is_trusted)
    except UnpicklingError:
        if is_trusted or not holds_objects(path):
            raise
        reason = "it holds objects, and building them executes code that the file names"
        advice = f"If you trust the file, use checkpoint.trusted=true.\n{advice}"
    else:
        if LEFT_OUT in checkpoint:
            reason = f"it lacks {checkpoint[LEFT_OUT]}, which could not be saved as plain data"
        elif checkpoint.get("safe_point", {}).get("format") != FORMAT:
            reason = "another version of the library wrote it"
        else:
            return checkpoint
    raise UserError(f"{path} cannot be resumed: {reason}.\n{advice}")
