"""A CSV or parquet file with a column to predict from the others.

What columns hold, their scales and their categories are learnt from the training rows, and kept
with the run: new rows are predicted without the training file.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from harness import SplitDataModule, UserError
from project.data.memory import Rows
from project.data.table_columns import (
    MISSING,
    as_numbers,
    check_flawed_numbers,
    chosen,
    encoded,
    learn_column,
    read_table,
)


class Table(SplitDataModule):
    """Rows of a table as matrices (B, F) of 32 bits with their targets (B,).

    Args:
        file: the table; ``None`` takes one of scikit-learn's: 442 diabetes patients (Efron et al.,
            "Least Angle Regression", Annals of Statistics 2004), or for classes 569 tumours
            (Street et al., "Nuclear feature extraction for breast tumor diagnosis", 1993).
        target: the column to predict.
        classes: whether it names classes; else it holds numbers, and keeps their units.
        ignore: columns to leave out; tables of predictions have them.
        features: the columns to predict from; ``None`` takes all others.
        categories: columns of numbers that are names, such as postal codes.
        missing: texts of a CSV that stand for no value.
        missing_targets: ``"refuse"`` rows without a target, or ``"drop"`` them.
        separator: of a CSV; ``None`` takes a comma, or in ``.tsv`` a tabulator.
        test_file: rows of their own to test on; then all others of ``file`` are trained on.
        predict_file: rows to predict on, without the target; ``None`` predicts on the test rows.
        **kwargs: see ``SplitDataModule``.
    """

    def __init__(
        self,
        file: str | None = None,
        target: str = "target",
        classes: bool = False,
        ignore: Sequence[str] = (),
        features: Sequence[str] | None = None,
        categories: Sequence[str] = (),
        missing: Sequence[str] = MISSING,
        missing_targets: Literal["refuse", "drop"] = "refuse",
        separator: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.file, self.target, self.classes = file, target, classes
        self.ignore = [ignore] if isinstance(ignore, str) else [*ignore]
        self.categories = [categories] if isinstance(categories, str) else [*categories]
        self.features, self.missing, self.separator = features, missing, separator
        self.drops_missing_targets = missing_targets == "drop"
        self.test_file, self.predict_file = test_file, predict_file

    def read(self, key: str, path: str) -> pl.DataFrame:
        """Read a file with the settings of this table."""
        return read_table(f"data.{key}", path, self.missing, self.separator)

    @cached_property
    def table(self) -> tuple[pl.DataFrame, NDArray[np.int64]]:
        """The rows of ``file`` that have a target, and their numbers in the file, from 0."""
        if self.file is not None:
            table = self.read("file", self.file)
        else:
            from sklearn.datasets import load_breast_cancer, load_diabetes

            data = load_breast_cancer() if self.classes else load_diabetes(scaled=False)
            columns = dict(zip(map(str, data.feature_names), data.data.T, strict=True))
            target = data.target_names[data.target] if self.classes else data.target
            table = pl.DataFrame(columns | {"target": target})
        chosen(table, [self.target, *self.ignore, *self.categories], f"data.file={self.file}")
        num_missing = table[self.target].null_count()
        if num_missing and not self.drops_missing_targets:
            raise UserError(
                f"data.target={self.target} has no value in {num_missing:,} of {table.height:,} "
                "rows.\nLeave these rows out with data.missing_targets=drop."
            )
        numbers = np.flatnonzero(table[self.target].is_not_null())
        return table[numbers], numbers

    def targets_of(self, column: pl.Series, class_names: Sequence[str] = ()) -> NDArray[Any]:
        """The class of each row as a position in ``class_names``, or its number."""
        if self.classes:
            codes = column.cast(pl.String).replace_strict(
                class_names, range(len(class_names)), default=None, return_dtype=pl.Int64
            )
            if codes.null_count():
                name = column.filter(codes.is_null())[0]
                raise UserError(
                    f"data.target={self.target} has the class {name!r}, new to the run."
                )
            return codes.to_numpy()
        numbers = as_numbers(column)
        if numbers is None:
            check_flawed_numbers(column)
            raise UserError(
                f"data.target={self.target} holds texts such as {column[0]!r}, and no numbers.\n"
                "For classes use experiment=table_classes, or data.classes=true with a classifier."
            )
        return numbers.astype(np.float32)

    @property
    def targets(self) -> pl.Series:
        """The column to predict."""
        return self.table[0][self.target]

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Positions of the rows of each split."""
        targets = self.targets_of(self.targets, self.class_names)
        parts = self.split(len(targets), targets if self.classes else None, self.class_names)
        if self.test_file is not None:
            parts["train"] = np.sort(np.concatenate([parts["train"], parts.pop("test")]))
        return parts

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes in the file, numbers by their values."""
        if not self.classes:
            return []
        names = self.targets.cast(pl.String).unique().to_list()
        if not 2 <= len(names) <= max(2, len(self.targets) // 2):
            raise UserError(
                f"data.target={self.target} has {len(names):,} values in {len(self.targets):,} "
                "rows, which name no classes.\nFor numbers use experiment=table."
            )
        return sorted(names, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else 0, n))

    @cached_property
    def checksum(self) -> int:
        """By which a run knows the targets that its splits were drawn from."""
        return zlib.crc32("\n".join(self.targets.cast(pl.String)).encode())

    def learn(self) -> dict[str, Any]:
        """Sizes, scales and categories of the training rows."""
        names = self.features or self.table[0].columns
        names = [n for n in names if n not in (*self.ignore, self.target)]
        features, train = chosen(self.table[0], names, f"data.file={self.file}"), self.rows["train"]
        columns = [learn_column(c, train, c.name in self.categories) for c in features]
        if not columns:
            raise UserError(f"data.file={self.file} has no column left to predict from.")
        sizes = [len(column["values"]) + 1 for column in columns if "values" in column]
        num_marks = sum(column.get("marks_missing", False) for column in columns)
        facts: dict[str, Any] = {
            "columns": columns,
            "in_features": len(columns) + num_marks,
            "cardinalities": sizes,
            "drawn_from": self.drawn_from(self.checksum),
        }
        found = f"{len(columns) - len(sizes)} columns of numbers, {len(sizes)} of categories"
        shown = f"; classes {', '.join(self.class_names[:20])}" if self.classes else ""
        self.say(f"data.file={self.file}: {len(self.targets):,} rows, {found}{shown}")
        if self.classes:
            return facts | {"num_classes": len(self.class_names), "class_names": self.class_names}
        targets = self.targets_of(self.targets)[train].astype(np.float64)
        std = float(targets.std()) or 1.0
        return facts | {"target_mean": float(targets.mean()), "target_std": std}

    @cached_property
    def inputs(self) -> NDArray[np.float32]:
        """All rows of ``file`` as one matrix (N, F)."""
        return self.encode(self.table[0], "file")

    def encode(self, table: pl.DataFrame, key: str) -> NDArray[np.float32]:
        """Encode rows as the training has learnt to."""
        names = [column["name"] for column in self.facts["columns"]]
        features = chosen(table, names, f"data.{key}={getattr(self, key)}")
        return encoded(features, self.facts["columns"])

    def make_dataset(self, split: str) -> Rows:
        """The rows of one split; predictions are made on those of the test, or of a file."""
        class_names = self.facts.get("class_names", ())
        is_new = split == "predict" and self.predict_file is not None
        if is_new or (split in ("test", "predict") and self.test_file is not None):
            key = "predict_file" if is_new else "test_file"
            table = self.read(key, getattr(self, key))
            numbers = positions = np.arange(table.height)
            inputs, targets = self.encode(table, key), None
            if not is_new:
                column = chosen(table, [self.target], f"data.{key}={self.test_file}")[self.target]
                targets = self.targets_of(column, class_names)
        else:
            (table, numbers), inputs = self.table, self.inputs
            positions = self.rows["test" if split == "predict" else split]
            targets = self.targets_of(self.targets, class_names)
            if split != "train":
                self.warn_if_changed(self.checksum)
        shown = [name for name in self.ignore if name in table.columns]
        about = {name: table[name][positions].to_list() for name in shown}
        return Rows(inputs, targets, positions, {"row": numbers[positions].tolist(), **about})
