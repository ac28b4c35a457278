"""Columns of a table as one matrix: scaled numbers, marks of missing ones, codes of categories."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError
from harness.names import few

if TYPE_CHECKING:
    import polars as pl

log = logging.getLogger(__name__)

CATEGORY = "category"
SECONDS_PER_DAY = 86_400
# A text column whose values are mostly numbers is rather one of numbers with a flaw.
MOSTLY = 0.5
DECIMAL_COMMA = r"^-?\d[\d.]*,\d+$"


def numbers_of(column: "pl.Series") -> tuple[str, NDArray[np.float64]] | None:
    """What a column holds, ``"number"``, ``"truth"`` or ``"date"``, and its values as numbers.

    Dates are days since 1970. Missing values are NaN; a column without any value is of numbers.

    Returns:
        ``None`` where a value is none of these: then the column is one of categories.
    """
    import polars as pl

    kind, found = "number", column
    if column.dtype == pl.String:
        found = column.cast(pl.Float64, strict=False)
        num_present = len(column) - column.null_count()
        if len(found) - found.null_count() < num_present:
            present = column.drop_nulls()
            if present.str.to_lowercase().is_in(["true", "false"]).all():
                kind, found = "truth", column.str.to_lowercase() == "true"
            elif present.str.contains(r"^\d{4}-\d\d-\d\d([ T]\d\d:\d\d|$)").all():
                try:
                    kind, found = "date", column.str.to_datetime(strict=False)
                except pl.exceptions.PolarsError:
                    return None
                if found.null_count() > column.null_count():
                    return None
            else:
                return None
    elif column.dtype == pl.Boolean:
        kind = "truth"
    elif column.dtype.is_temporal():
        kind = "date"
    if kind == "date":
        if found.dtype not in (pl.Date, pl.Datetime):
            raise UserError(
                f"column {column.name} holds {found.dtype}: numbers, truth values, dates and texts "
                f"can be used.\nLeave it out with data.ignore=[{column.name}]."
            )
        found = found.dt.epoch("us").cast(pl.Float64) / (SECONDS_PER_DAY * 1e6)
    if kind != "date" and not (found.dtype.is_numeric() or found.dtype in (pl.Boolean, pl.Null)):
        return None
    values = found.cast(pl.Float64).to_numpy().astype(np.float64)
    if np.isinf(values).any():
        raise UserError(
            f"column {column.name} has an infinite number in row "
            f"{int(np.isinf(values).argmax()) + 1}.\nMend it, or leave the column out with "
            f"data.ignore=[{column.name}]."
        )
    return kind, values


def texts_of(column: "pl.Series") -> "pl.Series":
    """A column of categories as texts.

    Raises:
        UserError: for a kind of value that is no category, such as a list.
    """
    import polars as pl

    if column.dtype.is_nested() or column.dtype in (pl.Binary, pl.Object):
        raise UserError(
            f"column {column.name} holds {column.dtype}: numbers, truth values, dates and texts "
            f"can be used.\nLeave it out with data.ignore=[{column.name}]."
        )
    return column.cast(pl.String)


def learn_columns(
    table: "pl.DataFrame", train: NDArray[np.int64], categories: Sequence[str]
) -> list[dict[str, Any]]:
    """How each column becomes numbers, learnt from the training rows alone: values as JSON has.

    Args:
        table: the columns to predict from.
        train: positions of the training rows.
        categories: columns of numbers whose values are names.

    Raises:
        UserError: for a column that can teach nothing.
    """
    learnt = []
    for column in table.iter_columns():
        found = None if column.name in categories else numbers_of(column)
        if found is None:
            is_asked_for = column.name in categories
            learnt.append(_category(column, train, is_asked_for))
            continue
        kind, values = found
        seen = values[train]
        seen, is_missing = seen[~np.isnan(seen)], np.isnan(seen)
        changes = len(seen) > 0 and seen.min() < seen.max()
        # Sums of a number that never changes are off by some bits, which scaling would blow up.
        mean = seen.mean() if changes else seen[0] if len(seen) else 0.0
        learnt.append(
            {
                "name": column.name,
                "kind": kind,
                "mean": float(mean),
                "std": float(seen.std()) if changes else 1.0,
                "marks_missing": bool(is_missing.any()),
            }
        )
    return learnt


def _category(column: "pl.Series", train: NDArray[np.int64], is_asked_for: bool) -> dict[str, Any]:
    texts = texts_of(column)
    present = texts.drop_nulls()
    if not is_asked_for:
        _check_category(texts, present)
    values = texts.gather(train).drop_nulls().unique().sort().to_list()
    return {"name": column.name, "kind": CATEGORY, "values": values}


def _check_category(texts: "pl.Series", present: "pl.Series") -> None:
    """Refuse ids and numbers with a flaw, which would be read as categories."""
    import polars as pl

    name, are_numbers = texts.name, present.cast(pl.Float64, strict=False).is_not_null()
    if are_numbers.mean() > MOSTLY:  # type: ignore[operator]  # never null here
        others = present.filter(~are_numbers)
        row = texts.index_of(others[0])
        raise UserError(
            f"column {name} holds numbers, and {len(others):,} others, the first of them "
            f"{others[0]!r} in row {row + 1 if row is not None else '?'}.\n"
            f"Count it as missing: data.missing=['{others[0]}']. Or take all as categories: "
            f"data.categories=[{name}]."
        )
    if present.str.contains(DECIMAL_COMMA).mean() > MOSTLY:  # type: ignore[operator]
        raise UserError(
            f"column {name} holds numbers with a decimal comma, such as {present[0]!r}.\n"
            f"Write them with a point, or take them as categories: data.categories=[{name}]."
        )
    if present.n_unique() == len(present) > 1:
        raise UserError(
            f"column {name} has another text in each of its {len(present):,} rows, such as "
            f"{present[0]!r}: an id?\n"
            f"Leave it out with data.ignore=[{name}], or insist with data.categories=[{name}]."
        )


def encoded(table: "pl.DataFrame", columns: Sequence[dict[str, Any]]) -> NDArray[np.float32]:
    """A table's rows as one matrix, as ``learn_columns`` has found for the training rows.

    Args:
        table: has the columns, in any order.
        columns: what was learnt of each.

    Returns:
        Shape (N, F): scaled numbers with 0 where one is missing, then a 1 where it is missing for
        those that were so in training, then categories from 1, and 0 for missing or unknown ones.

    Raises:
        UserError: if a column holds something else than in training.
    """
    numbers = [column for column in columns if column["kind"] != CATEGORY]
    marks = [column["name"] for column in numbers if column["marks_missing"]]
    categories = [column for column in columns if column["kind"] == CATEGORY]
    width = len(numbers) + len(marks) + len(categories)
    matrix = np.empty((table.height, width), dtype=np.float32)
    place_of_mark = {name: len(numbers) + i for i, name in enumerate(marks)}
    for i, column in enumerate(numbers):
        values = _numbers_as_learnt(table[column["name"]], column["kind"])
        is_missing = np.isnan(values)
        scaled = (values - column["mean"]) / column["std"]
        matrix[:, i] = np.where(is_missing, 0.0, scaled)
        if column["name"] in place_of_mark:
            matrix[:, place_of_mark[column["name"]]] = is_missing
    for i, column in enumerate(categories, start=len(numbers) + len(marks)):
        matrix[:, i] = _codes(table[column["name"]], column["values"])
    return matrix


def _numbers_as_learnt(column: "pl.Series", kind: str) -> NDArray[np.float64]:
    import polars as pl

    found = numbers_of(column)
    if found is None or (found[0] != kind and column.null_count() < len(column)):
        known = {"number": "numbers", "truth": "true and false", "date": "dates"}
        texts = texts_of(column)
        flaws = texts.filter(texts.cast(pl.Float64, strict=False).is_null() & texts.is_not_null())
        example = f", such as {flaws[0]!r}" if found is None and len(flaws) else ""
        raise UserError(
            f"column {column.name} holds {'texts' if found is None else known[found[0]]}"
            f"{example}; in training it held {known[kind]}.\nMend it, or train on this file."
        )
    return found[1]


def _codes(column: "pl.Series", values: list[str]) -> NDArray[np.uint32]:
    import polars as pl

    texts = texts_of(column)
    codes = texts.replace_strict(
        values, range(1, len(values) + 1), default=0, return_dtype=pl.UInt32
    )
    unknown = texts.filter((codes == 0) & texts.is_not_null())
    if len(unknown):
        counts = unknown.value_counts(sort=True).rows()
        shown = few(f"{value!r} ({count:,})" for value, count in counts)
        log.warning(
            "column %s has values that the training rows do not have: %s; they count as unknown.",
            column.name,
            shown,
        )
    return codes.to_numpy()
