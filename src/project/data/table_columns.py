"""Read tables, decide how to encode each column, and encode rows as one matrix of numbers.

In: a file. Out: the encoding of each column, as JSON values, and the matrix. Next: tables.py.
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
    """Read a parquet file with its types, or a CSV whose cells are texts without outer spaces.

    ``key`` is the config key of the file, for messages. See ``Table`` for the other arguments.
    """
    if "://" in path and not allow_urls:
        raise UserError(f"{key}={path} is a URL. If you trust it, type data.allow_urls=true.")
    if Path(path).is_dir():
        raise UserError(f"{key}={path} is a folder. Name a CSV or parquet file: {key}=<file>")
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".parquet":
            return pl.read_parquet(path).with_columns(pl.selectors.float().fill_nan(None))
        # As text, because all rows decide the type of a column, not only the first ones.
        separator = separator or ("\t" if suffix == ".tsv" else ",")
        table = pl.read_csv(path, infer_schema=False, separator=separator)
    except OSError as error:
        raise UserError(
            f"{key}={path} cannot be read: {error.strerror or error}\n"
            f"Name a CSV or parquet file: {key}=<file>"
        ) from error
    except pl.exceptions.PolarsError as error:
        raise UserError(f"{key}={path} cannot be read: {str(error).splitlines()[0]}") from error
    signs = [sign for sign in ";|" if table.width == 1 and sign in table.columns[0]]
    if signs:
        raise UserError(
            f"{key}={path} has one column, {table.columns[0]}. To separate its values, type: "
            f"'data.separator=\"{signs[0]}\"'"
        )
    table = table.rename(str.strip)
    if "" in table.columns:
        raise UserError(
            f"{key}={path} has a column without a name, such as the index that pandas writes.\n"
            "Name the column in the file, or write the file without it (index=False)."
        )
    table = table.with_columns(pl.all().str.strip_chars().replace(["", *missing], None))
    return table.filter(~pl.all_horizontal(pl.all().is_null()))


def select(table: pl.DataFrame, names: Sequence[str], source: str) -> pl.DataFrame:
    """Select columns of a table.

    Raises:
        UserError: if columns are missing; the message names them and ``source``.
    """
    if missing := [name for name in names if name not in table.columns]:
        raise UserError(
            f"{source} has no column {', '.join(missing)}.\n"
            f"Choose from its columns: {', '.join(table.columns[:30])}."
        )
    return table.select(names)


def as_numbers(column: pl.Series) -> NDArray[np.float64] | None:
    """Convert a column of numbers, truth values or dates (days since 1970) to floats.

    Returns:
        Shape (N,), with NaN for missing values; ``None`` for a column of texts.
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
        raise UserError(
            f"Column {column.name} has the type {numbers.dtype}, which cannot become numbers.\n"
            f"Leave out the column: data.ignore=[{column.name}]."
        )
    return numbers.cast(pl.Float64).to_numpy().astype(np.float64)


def learn_column(column: pl.Series, train: NDArray[np.int64], is_category: bool) -> dict[str, Any]:
    """Decide from the training rows how to encode a column; return the encoding as JSON values.

    Args:
        column: all rows of the column.
        train: indices of the training rows.
        is_category: whether to encode numbers as categories.
    """
    name, values = column.name, None if is_category else as_numbers(column)
    if values is None:
        known = column.cast(pl.String)[train].drop_nulls().unique().sort()
        return {"name": name, "values": known.to_list()}
    values = values[train]
    is_missing = np.isnan(values)
    seen = values[~is_missing] if not is_missing.all() else np.zeros(1)
    is_constant = seen.min() == seen.max()  # a computed deviation would be a tiny rounding error
    return {
        "name": name,
        "mean": float(seen[0] if is_constant else seen.mean()),
        "std": 1.0 if is_constant else float(seen.std()),
        "marks_missing": bool(is_missing.any()),
    }


def encode(
    table: pl.DataFrame, columns: Sequence[dict[str, Any]], source: str
) -> NDArray[np.float32]:
    """Encode rows as one matrix (N, F), with the results of ``learn_column``.

    The columns of the matrix are, in this order:

    - standardised numbers; 0 stands for a missing value
    - marks of missing values, 0 or 1, for each column that lacks values in training rows
    - codes of categories, from 1; 0 stands for a missing or unknown value
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
                unknown = "have values that the training rows lack. These values count as missing"
                SplitDataModule.say(f"Column {series.name}: {num:,} rows {unknown}")
            codes.append(code.to_numpy())
            continue
        values = as_numbers(series)
        if values is None:
            raise UserError(
                f"Column {series.name} of {source} has texts, but it had numbers in training.\n"
                "Write numbers into this column."
            )
        is_missing = np.isnan(values)
        numbers.append(np.where(is_missing, 0.0, (values - column["mean"]) / column["std"]))
        marks += [is_missing] if column["marks_missing"] else []
    return np.stack([*numbers, *marks, *codes], axis=1).astype(np.float32)
