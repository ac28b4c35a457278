"""Arrays of numbers in NumPy's files, mapped into memory."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError

CHECKED_BYTES = 2**26  # are looked at at once for NaN


def open_array(place: str, name: str) -> NDArray[Any]:
    """Map an array of a ``.npy`` file, without reading it.

    Args:
        place: the setting that names it, for messages.
        name: of the file.

    Raises:
        UserError: if it cannot be read, or holds no numbers.
    """
    path = Path(name)
    if path.suffix != ".npy":
        raise UserError(f"{place} must be a .npy file: np.save(path, array) writes one.")
    array: NDArray[Any]
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError) as error:
        is_object = "object" in str(error).lower()
        reason = "holds Python objects, which could run code" if is_object else "is damaged"
        raise UserError(
            f"{place} {reason}.\nSave it again: np.save(path, array.astype('float32'))."
        ) from error
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise UserError(f"{place} holds {array.dtype} of shape {array.shape}, and no numbers.")
    if len(array) == 0:
        raise UserError(f"{place} has no samples.")
    return array


def refuse_nan(place: str, array: NDArray[Any]) -> None:
    """Look at an array block by block, which needs no memory.

    Raises:
        UserError: with the first sample that has a number which is not finite.
    """
    if array.dtype.kind != "f":
        return
    num_rows = max(1, CHECKED_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), num_rows):
        block = array[start : start + num_rows]
        # A sum finds them faster than a look at each; it may also overflow.
        if np.isfinite(block.sum(dtype=np.float64)):
            continue
        is_bad = ~np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if is_bad.any():
            raise UserError(
                f"{place} has NaN or an infinite number at sample {start + int(is_bad.argmax())}.\n"
                "Mend it, or leave these samples out."
            )
