"""Read a table from a file; every mistake of the file is told with its place."""

import csv
import difflib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import UserError

if TYPE_CHECKING:
    import polars as pl

SEPARATORS = {".csv": ",", ".tsv": "\t"}
PARQUET = (".parquet", ".pq")


def read_table(
    key: str, path: str | Path, missing: Sequence[str] = (), separator: str | None = None
) -> "pl.DataFrame":
    """Read all rows and columns of a CSV or parquet file.

    Args:
        key: the setting that the path comes from, for messages.
        path: the file; its suffix says what it is.
        missing: texts of a CSV that stand for no value, beside the empty text.
        separator: of a CSV; ``None`` takes a comma, or in ``.tsv`` a tabulator.

    Returns:
        Texts of a CSV, and a parquet file's own types; null where there is no value.

    Raises:
        UserError: if it cannot be read, or not every line of it has every column.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (*SEPARATORS, *PARQUET):
        raise UserError(
            f"{key}={path} is no table that can be read.\nUse a .csv, a .tsv or a .parquet file."
        )
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{key}={path} is empty: its first line must name the columns.")
        if suffix in PARQUET:
            table = _read_parquet(key, path)
        else:
            table = _read_csv(key, path, missing, separator or SEPARATORS[suffix])
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.strerror or error}.") from error
    if table.is_empty():
        raise UserError(f"{key}={path} has no rows below the names of its columns.")
    return table


def _read_parquet(key: str, path: Path) -> "pl.DataFrame":
    import polars as pl

    try:
        return pl.read_parquet(path)
    except pl.exceptions.PolarsError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{key}={path} is no parquet file, or is damaged: {reason}.") from error


def _read_csv(key: str, path: Path, missing: Sequence[str], separator: str) -> "pl.DataFrame":
    import polars as pl

    names, is_blank = _checked_lines(key, path, separator)
    try:
        table = pl.read_csv(
            path,
            # All as text: what a column holds is decided by all of its rows, and not by the first.
            infer_schema=False,
            separator=separator,
        )
    except pl.exceptions.PolarsError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{key}={path} cannot be read: {reason}.") from error
    if table.height != len(is_blank):
        raise UserError(f"{key}={path} has a quotation mark that is never closed.")
    table.columns = names
    # After the spaces around them, which polars would take for a part of the text.
    nothing = ["", *(text.strip() for text in missing)]
    stripped = pl.all().str.strip_chars()
    return table.filter(pl.Series(~is_blank)).with_columns(
        stripped.replace(nothing, [None] * len(nothing))
    )


def _checked_lines(
    key: str, path: Path, separator: str
) -> tuple[list[str], "np.ndarray[tuple[int], np.dtype[np.bool_]]"]:
    """The names of a CSV's columns, and which of the lines below them are blank.

    Polars would fill up a short line with nulls.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=separator)
            names = [name.strip() for name in next(reader, [])]
            lengths = np.fromiter(map(len, reader), dtype=np.int64)
            _check_names(key, path, names, separator)
            ragged = np.flatnonzero((lengths != len(names)) & (lengths != 0))
            if len(ragged):
                file.seek(0)
                reader = csv.reader(file, delimiter=separator)
                for _ in range(ragged[0] + 2):
                    next(reader)
                raise UserError(
                    f"{key}={path}, line {reader.line_num}: {lengths[ragged[0]]} values for "
                    f"{len(names)} columns ({_count(len(ragged), 'such line')}).\n"
                    'Mend it; a value with a separator in it stands in quotes, "a, b".'
                )
    except UnicodeDecodeError as error:
        raise UserError(
            f"{key}={path} is no text in UTF-8.\nSave it as CSV in UTF-8 (or as parquet)."
        ) from error
    except csv.Error as error:
        raise UserError(f"{key}={path}, line {reader.line_num}: {error}.") from error
    return names, lengths == 0


def _check_names(key: str, path: Path, names: list[str], separator: str) -> None:
    if doubled := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(
            f"{key}={path} has several columns of the name {', '.join(doubled)}.\nRename them."
        )
    if "" in names:
        raise UserError(
            f"{key}={path}: column {names.index('') + 1} has no name, as an index that pandas "
            "writes.\nName it in the file, or write the file without (index=False)."
        )
    found = [other for other in (";", "\t", ",", "|") if other != separator]
    if len(names) == 1 and (others := [other for other in found if other in names[0]]):
        raise UserError(
            f"{key}={path} has one column, {names[0]!r}: its separator is another.\n"
            f"Add 'data.separator=\"{others[0]}\"'."
        )


def check_columns(key: str, path: str | Path, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Refuse a file that lacks columns.

    Raises:
        UserError: with all that are missing, and what comes nearest to them.
    """
    if not (lacking := [name for name in wanted if name not in there]):
        return
    near = {
        name: close[0]
        for name in lacking
        if (close := difflib.get_close_matches(name, there, n=1, cutoff=0.5))
    }
    hint = f" Did you mean {', '.join(near.values())}?" if near else ""
    shown = ", ".join(there[:20]) + (", ..." if len(there) > 20 else "")
    raise UserError(f"{key}={path} has no column {', '.join(lacking)}.{hint}\nIt has {shown}.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number > 1 else ''}"
