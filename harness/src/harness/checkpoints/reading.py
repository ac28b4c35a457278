"""Read checkpoints. Nothing in them is executed, whatever their author has saved."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from harness.checkpoints import unpickling
from harness.checkpoints.lookup import damage
from harness.errors import UserError

ZIP = b"PK\3\4"
FORMAT = 1  # of what a run goes on from; raised when going on changes


def read(path: str | Path, map_location: Any = "cpu", mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint; a `StandIn` is where only its author's code could build what it holds.

    Raises:
        UnpicklingError: it cannot be read, or holds no dict.
        OSError: the system refuses to read it.
        RuntimeError: it is cut off, or no file of ``torch.save``.
    """
    try:
        found = torch.load(path, map_location, weights_only=True, mmap=mmap)
    except (OSError, RuntimeError, MemoryError):
        raise
    except Exception as refused:  # it holds more than numbers, text and tensors
        with open(path, "rb") as file:
            if file.read(len(ZIP)) != ZIP:  # another format, for which torch uses other readers
                raise
        found = _read_as_data(path, map_location, mmap, refused)
    if not isinstance(found, dict):
        raise UnpicklingError(f"it holds a {type(found).__name__} instead of a training's state")
    return found


def _read_as_data(path: str | Path, map_location: Any, mmap: bool, refused: Exception) -> Any:
    try:
        return torch.load(path, map_location, unpickling, weights_only=False, mmap=mmap)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # whatever a pickle that no program writes leads to
        said = str(error).partition("\n")[0]
        raise UnpicklingError(f"its pickle cannot be read ({said})") from refused


def unreadable(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; also where torch is stricter than its checksums."""
    reason = damage(path)
    if reason is None:
        try:
            read(path, mmap=True)
        except Exception as error:  # whatever torch makes of a flipped bit
            reason = str(error).partition("\n")[0]
    return reason


def check_format(checkpoint: dict[str, Any], path: Any) -> None:
    """Refuse to go on from what another version has written; its weights are read as ever.

    Raises:
        UserError: names what still can be done.
    """
    if checkpoint.get("safe_point", {}).get("format") != FORMAT:
        raise UserError(
            f"{path} cannot be gone on with: another version of the harness has written it.\n"
            f"Go back to that version, or start another run from its weights with init={path}."
        )
