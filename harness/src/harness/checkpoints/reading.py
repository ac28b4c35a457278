"""Reads checkpoints, and executes nothing in them, unless ``checkpoint.trusted=true`` goes on.

In: a file that ``writing`` wrote. Out: its values, or a reason why no run can go on from it.
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

FORMAT = 4  # of what a run goes on from; raised when resuming changes
ATTRIBUTES = "changed_attributes"  # the entry that is packed and unpacked by ``attributes``
LEFT_OUT = "left_out"  # the entry that names objects without which no run can go on


def read(path: str | Path, map_location: Any = "cpu", is_trusted: bool = False) -> dict[str, Any]:
    """Map a checkpoint; only with `is_trusted` objects in it are built, which executes code.

    Its tensors on the CPU are places in the file: they are read where somebody uses them, all ranks
    of a machine share these pages, and what is written to one of them does not reach the file. As
    long as one of them is there the system keeps the bytes of a removed file.

    Raises:
        UnpicklingError: it cannot be read, is none of a training, or holds objects.
        OSError: the system refuses to read it.
        RuntimeError: it is cut off, or no file of ``torch.save``.
    """
    try:
        is_mappable = zipfile.is_zipfile(path)  # torch before 1.6 wrote no zip
        found = torch.load(path, map_location, weights_only=not is_trusted, mmap=is_mappable)
    except (OSError, RuntimeError, MemoryError, UnpicklingError):
        raise
    except Exception as error:  # whatever a pickle that no program writes leads to
        raise UnpicklingError(f"its pickle cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise UnpicklingError(f"it holds a {type(found).__name__} instead of a training's state")
    unpack = Unpacker().unpack
    return {key: value if key == ATTRIBUTES else unpack(value) for key, value in found.items()}


def read_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """Read the weights, and what training had changed beside them, if a checkpoint has that.

    Of one that holds objects the weights alone are read, and no object is built.

    Raises:
        KeyError: it holds no weights.
        UnpicklingError, OSError, RuntimeError: see ``read``.
    """
    try:
        found = read(path)
        return found["state_dict"], found.get(ATTRIBUTES)
    except UnpicklingError:
        if not holds_objects(path):
            raise
    from harness import convert  # for what checkpoint.trusted=true has kept alone

    try:
        return convert.load(path, key="state_dict", prefix="", ema=False), None
    except convert.CheckpointError as error:
        raise UnpicklingError(str(error)) from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights alone; arguments and errors as of ``read_model``."""
    return read_model(path)[0]


def holds_objects(path: Path) -> bool:
    """Return whether a readable checkpoint holds objects that only its author's code builds."""
    try:
        return bool(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # its pickle is damaged
        return False


def unreadable(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; also where torch is stricter than its checksums."""
    reason = damage(path)
    if reason is None:
        try:
            read(path)
        except Exception as error:  # whatever torch makes of a flipped bit
            if not holds_objects(path):
                reason = str(error).partition("\n")[0]
    return reason


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is not damaged, and a line for each newer one that is."""
    skipped: list[str] = []
    for path in reversed(by_step(folder)):
        reason = unreadable(path)
        if reason is None:
            return path, skipped
        skipped.append(f"{path} is damaged and was skipped: {reason}.")
    return None, skipped


def read_to_resume(path: Path, map_location: Any, is_trusted: bool) -> dict[str, Any]:
    """Read a checkpoint for going on.

    Raises:
        UserError: it lacks or holds objects, or another version has written it.
    """
    advice = f"Start another run from its weights with init={path}."
    try:
        checkpoint = read(path, map_location, is_trusted=is_trusted)
    except UnpicklingError:
        if is_trusted or not holds_objects(path):
            raise
        reason = "it holds objects, and to build them executes code that the file names"
        advice = f"checkpoint.trusted=true goes on with one of a run of yours. Or: {advice}"
    else:
        if LEFT_OUT in checkpoint:
            reason = f"it lacks {checkpoint[LEFT_OUT]}, which is not plain"
        elif checkpoint.get("safe_point", {}).get("format") != FORMAT:
            reason = "another version of the harness has written it"
        else:
            return checkpoint
    raise UserError(f"{path} cannot be gone on with: {reason}.\n{advice}")
