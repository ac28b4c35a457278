"""Arrays of numbers in NumPy's files, mapped into memory where that can be."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from harness.errors import UserError
from harness.tables.reading import check_columns

CHECKED_BYTES = 2**26  # are looked at at once for NaN
LOCAL_HEADER = 30  # bytes of a zip file's member before its name


def open_array(place: str, name: str, file: str | None) -> NDArray[Any]:
    """Map an array, without reading it.

    Args:
        place: the setting that names it, for messages.
        name: of a ``.npy`` file, or of an array in ``file``.
        file: a ``.npz``, or ``None``.

    Raises:
        UserError: if it cannot be read, or holds no numbers.
    """
    path = Path(name if file is None else file)
    suffix, where = (".npy", place) if file is None else (".npz", f"data.file={path}")
    if path.suffix != suffix:
        hint = "; data.file=<file.npz> holds several arrays" if file is None else ""
        raise UserError(f"{where} must be a {suffix} file{hint}.")
    array: NDArray[Any]
    try:
        if file is None:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            array = member(path, name)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        is_object = "object" in str(error).lower()
        reason = "holds Python objects, which could run code" if is_object else "is damaged"
        raise UserError(
            f"{where} {reason}.\nSave it again: np.save(path, array.astype('float32'))."
        ) from error
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise UserError(f"{place} holds {array.dtype} of shape {array.shape}, and no numbers.")
    if len(array) == 0:
        raise UserError(f"{place} has no samples.")
    return array


def member(path: Path, name: str) -> NDArray[Any]:
    """One array of a ``.npz``: mapped where it is stored as it is, else read.

    Raises:
        UserError: if there is none of the name.
        OSError, ValueError, zipfile.BadZipFile: if it is damaged, or holds objects.
    """
    with zipfile.ZipFile(path) as archive:
        names = [entry.removesuffix(".npy") for entry in archive.namelist()]
        check_columns("data.file", path, [name], names, "array")
        found = archive.getinfo(f"{name}.npy")
    if found.compress_type != zipfile.ZIP_STORED:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])
    with path.open("rb") as file:
        file.seek(found.header_offset)
        header = file.read(LOCAL_HEADER)
        lengths = [int.from_bytes(header[i : i + 2], "little") for i in (26, 28)]  # name, more
        file.seek(sum(lengths), 1)
        is_first = npy.read_magic(file) == (1, 0)
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("an array of objects")
        order: Any = "F" if is_fortran else "C"
        mapped: NDArray[Any] = np.memmap(path, dtype, "r", file.tell(), shape, order)
        return mapped


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
