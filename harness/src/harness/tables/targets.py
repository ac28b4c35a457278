"""A table's column of targets: names of classes, or numbers."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError
from harness.tables.columns import numbers_of, texts_of

if TYPE_CHECKING:
    import polars as pl


def learn_classes(column: "pl.Series") -> dict[str, Any]:
    """Names and counts of the classes, as facts."""
    counts = dict(labels_of(column).drop_nulls().value_counts().rows())
    names = sorted(counts, key=natural)
    if len(names) < 2:
        found = f"one class alone, {names[0]!r}" if names else "no value in any row"
        raise UserError(f"data.target={column.name} has {found}: two classes are needed.")
    return {
        "num_classes": len(names),
        "class_names": names,
        "class_counts": [counts[name] for name in names],
    }


def labels_of(column: "pl.Series") -> "pl.Series":
    """Texts that name classes; whole numbers are written alike whatever they were written as.

    Raises:
        UserError: for numbers with fractions.
    """
    import polars as pl

    found = numbers_of(column)
    if found is None or found[0] != "number":
        return texts_of(column)
    if column.dtype == pl.String or column.dtype.is_integer():  # exact, also beyond 2^53
        whole = column.cast(pl.Int64, strict=False)
        if whole.null_count() == column.null_count():
            return whole.cast(pl.String)
    values = pl.Series(column.name, found[1], nan_to_null=True)
    if fractions := values.filter(values != values.round()).to_list():
        raise UserError(
            f"data.target={column.name} has numbers such as {fractions[0]:g}, which name no "
            "classes.\nUse experiment=table, or data.classes=false with a model for numbers."
        )
    return values.cast(pl.Int64).cast(pl.String)


def target_classes(column: "pl.Series", class_names: list[str]) -> NDArray[np.int64]:
    """The class of each row, and -1 where there is none."""
    import polars as pl

    labels = labels_of(column)
    codes = labels.replace_strict(
        class_names, range(len(class_names)), default=-1, return_dtype=pl.Int64
    )
    if len(others := labels.filter((codes < 0) & labels.is_not_null())):
        raise UserError(
            f"data.target={column.name} has a class {others[0]!r} in {len(others):,} rows or more, "
            f"which the training did not have: {', '.join(class_names[:20])}."
        )
    return codes.to_numpy().astype(np.int64)


def target_numbers(column: "pl.Series") -> NDArray[np.float32]:
    """The number of each row, and NaN where there is none."""
    found = numbers_of(column)
    if found is None or found[0] != "number":
        held = texts_of(column.drop_nulls())
        raise UserError(
            f"data.target={column.name} holds no numbers: {held[0]!r} is one of its values.\n"
            "For classes use experiment=table_classes, or data.classes=true with a classifier."
        )
    return found[1].astype(np.float32)


def natural(label: str) -> tuple[bool, int, str]:
    """Sorts numbers by value and before other texts."""
    is_number = label.lstrip("-").isdecimal()
    return not is_number, int(label) if is_number else 0, label
