"""Reads checkpoints and executes nothing, unless the run says ``checkpoint.trusted=true``.

In: a file that ``writing`` wrote. Out: its values, or a reason why no run can go on from it.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from harness import convert
from harness.checkpoints.lookup import damage
from harness.checkpoints.plain import Unpacker
from harness.errors import UserError

FORMAT = 2  # of what a run goes on from; raised when resuming changes
ATTRIBUTES = "changed_attributes"  # the entry that is packed and unpacked by ``attributes``
LEFT_OUT = "left_out"  # the entry that names objects without which no run can go on


def read(
    path: str | Path, map_location: Any = "cpu", mmap: bool = False, is_trusted: bool = False
) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        UnpicklingError: it cannot be read, is none of a training, or holds objects.
        OSError: the system refuses to read it.
        RuntimeError: it is cut off, or no file of ``torch.save``.
    """
    try:
        found = torch.load(path, map_location, weights_only=not is_trusted, mmap=mmap)
    except (OSError, RuntimeError, MemoryError, UnpicklingError):
        raise
    except Exception as error:  # whatever a pickle that no program writes leads to
        raise UnpicklingError(f"its pickle cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise UnpicklingError(f"it holds a {type(found).__name__} instead of a training's state")
    unpack = Unpacker().unpack
    return {key: value if key == ATTRIBUTES else unpack(value) for key, value in found.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights alone, also of a checkpoint that holds objects: those are not built.

    Raises:
        CheckpointError: it holds objects, and no weights that can be read without building them.
        KeyError: it holds no weights.
        UnpicklingError, OSError, RuntimeError: see ``read``.
    """
    try:
        weights: dict[str, Tensor] = read(path)["state_dict"]
        return weights
    except UnpicklingError:
        if not holds_objects(path):
            raise
    return convert.load(path, key="state_dict", prefix="", ema=False, keep_module=True)


def holds_objects(path: Path) -> bool:
    """Whether a checkpoint can be read, and holds what only the code of its author can build."""
    try:
        return bool(get_unsafe_globals_in_checkpoint(path))
    except Exception:  # its pickle is damaged
        return False


def unreadable(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; also where torch is stricter than its checksums."""
    reason = damage(path)
    if reason is None:
        try:
            read(path, mmap=True)
        except Exception as error:  # whatever torch makes of a flipped bit
            if not holds_objects(path):
                reason = str(error).partition("\n")[0]
    return reason


def read_to_resume(path: Path, map_location: Any, is_trusted: bool) -> dict[str, Any]:
    """Read a checkpoint for going on, and refuse one that has lost or still holds objects.

    Raises:
        UserError: names what still can be done.
    """
    try:
        checkpoint = read(path, map_location, is_trusted=is_trusted)
    except UnpicklingError as error:
        if not holds_objects(path):
            raise
        raise UserError(
            f"{path} holds objects, which only a run with checkpoint.trusted=true goes on with: to "
            f"read them executes code of the file.\nOr {start_anew(path)}."
        ) from error
    if objects := checkpoint.get(LEFT_OUT):
        raise UserError(
            f"{path} lacks {objects}, which is not plain, and cannot be gone on with.\n"
            f"Use checkpoint.trusted=true from the start, or {start_anew(path)}."
        )
    return checkpoint


def check_format(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuse to go on from what another version has written; its weights are read as ever.

    Raises:
        UserError: names what still can be done.
    """
    if checkpoint.get("safe_point", {}).get("format") != FORMAT:
        raise UserError(
            f"{path} cannot be gone on with: another version of the harness has written it.\n"
            f"Go back to that version, or {start_anew(path)}."
        )


def start_anew(path: Any) -> str:
    """What a refusal offers."""
    return f"start another run from its weights with init={path}"
