"""Columns of tables: read, told apart, and encoded as one matrix of numbers.

In: a file. Out: how each column becomes numbers, as plain values, and the matrix. Next: tables.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from harness import SplitDataModule, UserError

MISSING = ("NA", "N/A", "nan", "NaN", "null", "?")
DATE = r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?$"


def read_table(
    key: str,
    path: str,
    missing: Sequence[str] = MISSING,
    separator: str | None = None,
    allow_urls: bool = False,
) -> pl.DataFrame:
    """Read a parquet file with its own types, or a CSV as texts without spaces around them.

    ``key`` is the setting that names the file, for messages; see ``Table`` for the others.
    """
    if "://" in path and not allow_urls:
        raise UserError(
            f"{key}={path} is no path. If you trust that address, type data.allow_urls=true."
        )
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".parquet":
            return pl.read_parquet(path).with_columns(pl.selectors.float().fill_nan(None))
        # As text: all rows decide what a column holds, and not the first ones.
        separator = separator or ("\t" if suffix == ".tsv" else ",")
        table = pl.read_csv(path, infer_schema=False, separator=separator)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read: {error.strerror or error}") from error
    except pl.exceptions.PolarsError as error:
        raise UserError(
            f"{key}={path} cannot be read: {str(error).splitlines()[0]}\n"
            "If its values are not separated by commas, say by what: 'data.separator=\";\"'."
        ) from error
    table = table.rename(str.strip)
    if "" in table.columns:
        raise UserError(
            f"{key}={path} has a column without a name, as an index that pandas writes.\n"
            "Name it in the file, or write the file without it (index=False)."
        )
    table = table.with_columns(pl.all().str.strip_chars().replace(["", *missing], None))
    return table.filter(~pl.all_horizontal(pl.all().is_null()))


def select(table: pl.DataFrame, names: Sequence[str], source: str) -> pl.DataFrame:
    """Select columns of a table, or say which are missing."""
    if missing := [name for name in names if name not in table.columns]:
        raise UserError(
            f"{source} has no column {', '.join(missing)}.\nIt has {', '.join(table.columns[:30])}."
        )
    return table.select(names)


def as_numbers(column: pl.Series) -> NDArray[np.float64] | None:
    """Return a column of numbers, truth values or dates (days since 1970); NaN is missing.

    Returns:
        ``None`` for a column of texts.
    """
    numbers = column
    if column.dtype == pl.String:
        numbers = column.cast(pl.Float64, strict=False)
        if numbers.null_count() > column.null_count():
            present = column.drop_nulls()
            if present.str.to_lowercase().is_in(["true", "false"]).all():
                numbers = column.str.to_lowercase() == "true"
            elif present.str.contains(DATE).all():
                numbers = column.str.to_datetime(strict=False)
            else:
                return None
    if numbers.dtype in (pl.Date, pl.Datetime):
        numbers = numbers.cast(pl.Datetime("us")).dt.epoch("us") / (86_400 * 1e6)
    if numbers.dtype in (pl.Categorical, pl.Enum):
        return None
    if not (numbers.dtype.is_numeric() or numbers.dtype in (pl.Boolean, pl.Null)):
        raise UserError(f"column {column.name} holds {numbers.dtype}: data.ignore=[{column.name}].")
    return numbers.cast(pl.Float64).to_numpy().astype(np.float64)


def learn_column(column: pl.Series, train: NDArray[np.int64], is_category: bool) -> dict[str, Any]:
    """Learn from its training rows how a column becomes numbers, as plain values."""
    name, values = column.name, None if is_category else as_numbers(column)
    if values is None:
        known = column.cast(pl.String)[train].drop_nulls().unique().sort()
        return {"name": name, "values": known.to_list()}
    values = values[train]
    is_missing = np.isnan(values)
    seen = values[~is_missing] if not is_missing.all() else np.zeros(1)
    is_constant = seen.min() == seen.max()  # rounding errors of its sums would be blown up
    return {
        "name": name,
        "mean": float(seen[0] if is_constant else seen.mean()),
        "std": 1.0 if is_constant else float(seen.std()),
        "marks_missing": bool(is_missing.any()),
    }


def encode(
    table: pl.DataFrame, columns: Sequence[dict[str, Any]], source: str
) -> NDArray[np.float32]:
    """Encode rows as one matrix (N, F), as ``learn_column`` has learnt each column.

    First numbers, scaled, 0 where one is missing; then marks for columns with missing numbers; then
    codes of categories, from 1, 0 where one is missing or unknown.
    """
    numbers, marks, codes = [], [], []
    features = select(table, [column["name"] for column in columns], source)
    for series, column in zip(features, columns, strict=True):
        if "values" in column:
            known = column["values"]
            code = series.cast(pl.String).replace_strict(
                known, range(1, len(known) + 1), default=0, return_dtype=pl.UInt32
            )
            if num := int(((code == 0) & series.is_not_null()).sum()):
                unknown = "have values that training did not have, and count as missing"
                SplitDataModule.say(f"column {series.name}: {num:,} rows {unknown}")
            codes.append(code.to_numpy())
            continue
        values = as_numbers(series)
        if values is None:
            raise UserError(f"column {series.name} holds texts; in training it held numbers.")
        is_missing = np.isnan(values)
        numbers.append(np.where(is_missing, 0.0, (values - column["mean"]) / column["std"]))
        marks += [is_missing] if column["marks_missing"] else []
    return np.stack([*numbers, *marks, *codes], axis=1).astype(np.float32)
