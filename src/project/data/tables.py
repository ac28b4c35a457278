"""A CSV or parquet file with a column to predict from the other columns.

In: a file. Out: float32 matrices with their targets. table_columns.py finds the types, scales and
categories of the columns in the training rows. The run saves these, so that predictions on new rows
do not need the training file.
"""

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from harness import SplitDataModule, UserError
from project.data.array_dataset import ArrayDataset
from project.data.table_columns import (
    MISSING,
    as_numbers,
    encode,
    learn_column,
    read_table,
    select,
)


class Table(SplitDataModule):
    """Rows of a table as float32 matrices (B, F) with their targets (B,).

    Args:
        file: the table; ``None`` uses a table of scikit-learn: diabetes patients, or tumours.
        target: the column to predict.
        classes: whether the target column names classes; otherwise it has numbers.
        ignore: columns that are not inputs; a table of predictions contains these columns.
        categories: columns of numbers to treat as categories, such as postal codes.
        missing: texts of a CSV that mean a missing value.
        separator: separator of a CSV; ``None`` means a comma, or a tab in ``.tsv``.
        test_file: a table of test rows. With it, no row of ``file`` is a test row.
        predict_file: rows to predict on, with or without the target; ``None`` predicts on the test
            rows.
        allow_urls: whether a file may be a URL.
        **kwargs: see ``SplitDataModule``.
    """

    def __init__(
        self,
        file: str | None = None,
        target: str = "target",
        classes: bool = False,
        ignore: Sequence[str] = (),
        categories: Sequence[str] = (),
        missing: Sequence[str] = MISSING,
        separator: str | None = None,
        test_file: str | None = None,
        predict_file: str | None = None,
        allow_urls: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.file, self.target, self.classes = file, target, classes
        self.ignore, self.categories = (
            [names] if isinstance(names, str) else [*names] for names in (ignore, categories)
        )
        self.missing, self.separator = missing, separator
        self.test_file, self.predict_file = test_file, predict_file
        self.allow_urls = allow_urls

    def read(self, key: str) -> pl.DataFrame:
        """Read the file that the key ``data.<key>`` names."""
        path = getattr(self, key)
        return read_table(f"data.{key}", path, self.missing, self.separator, self.allow_urls)

    @cached_property
    def table(self) -> pl.DataFrame:
        """The rows of ``file``."""
        if self.file is not None:
            table = self.read("file")
        else:
            from sklearn.datasets import load_breast_cancer, load_diabetes

            data = load_breast_cancer() if self.classes else load_diabetes(scaled=False)
            columns = dict(zip(map(str, data.feature_names), data.data.T, strict=True))
            target = data.target_names[data.target] if self.classes else data.target
            table = pl.DataFrame(columns | {"target": target})
        if self.target in self.ignore:
            raise UserError(
                f"data.ignore=[{','.join(self.ignore)}] leaves out data.target={self.target}.\n"
                "Remove it from data.ignore, or choose another data.target."
            )
        select(table, [self.target, *self.ignore, *self.categories], f"data.file={self.file}")
        if num_missing := table[self.target].null_count():
            raise UserError(
                f"data.target={self.target} has no value in {num_missing:,} of {table.height:,} "
                "rows.\nRemove these rows from the file."
            )
        return table

    def encode_targets(self, column: pl.Series, class_names: Sequence[str] = ()) -> NDArray[Any]:
        """Return the target of each row: a number, or an index into ``class_names``."""
        if self.classes:
            codes = column.cast(pl.String).replace_strict(
                class_names, range(len(class_names)), default=None, return_dtype=pl.Int64
            )
            if codes.null_count():
                name = column.filter(codes.is_null())[0]
                raise UserError(
                    f"data.target={self.target} has the class {name!r}, which the training rows "
                    "lack.\nRemove the rows of this class, or train a new run with them."
                )
            return codes.to_numpy()
        numbers = as_numbers(column)
        if numbers is None:
            texts = column.cast(pl.String).drop_nulls()
            text = texts.filter(texts.cast(pl.Float64, strict=False).is_null())[0]
            raise UserError(
                f"data.target={self.target} has texts such as {text!r}, but numbers are needed.\n"
                "For classes use experiment=table_classes, or data.classes=true with a classifier."
            )
        return numbers.astype(np.float32)

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes in the file; names that are integers are sorted by value."""
        targets = self.table[self.target].cast(pl.String)
        names = targets.unique().to_list() if self.classes else []
        if self.classes and not 2 <= len(names) <= max(2, len(targets) // 2):
            raise UserError(
                f"data.target={self.target} has {len(names):,} different values in "
                f"{len(targets):,} rows, which cannot be classes.\n"
                "For numbers use experiment=table."
            )
        return sorted(names, key=lambda n: (not n.isdecimal(), int(n) if n.isdecimal() else 0, n))

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Indices of the rows of each split."""
        targets = self.encode_targets(self.table[self.target], self.class_names)
        parts = self.split(len(targets), targets if self.classes else None, self.class_names)
        if self.test_file is not None:
            parts["train"] = np.sort(np.concatenate([parts["train"], parts.pop("test")]))
        return parts

    @cached_property
    def checksum(self) -> int:
        """Checksum of the targets, to warn if the file has changed since training."""
        return zlib.crc32("\n".join(self.table[self.target].cast(pl.String)).encode())

    def infer_facts(self) -> dict[str, Any]:
        """Return sizes, and the scales and categories of the training rows."""
        features, train = self.table.drop(self.target, *self.ignore), self.rows["train"]
        if not features.width:
            raise UserError(
                f"data.file={self.file} has no columns besides data.target and those in "
                "data.ignore.\nAdd input columns to the file, or shorten data.ignore."
            )
        columns = [learn_column(c, train, c.name in self.categories) for c in features]
        sizes = [len(column["values"]) + 1 for column in columns if "values" in column]
        num_marks = sum(column.get("marks_missing", False) for column in columns)
        facts: dict[str, Any] = {
            "columns": columns,
            "in_features": len(columns) + num_marks,
            "cardinalities": sizes,
            "drawn_from": self.drawn_from(self.checksum),
        }
        texts = [f"{c['name']} ({len(c['values']):,})" for c in columns if "values" in c]
        kinds = f"{len(columns) - len(texts)} columns of numbers"
        kinds += f"; categories {', '.join(texts)}" if texts else ""
        names = f"; classes {', '.join(self.class_names[:20])}" if self.classes else ""
        source = "the built-in table" if self.file is None else f"data.file={self.file}"
        self.say(f"{source}: {self.table.height:,} rows, {kinds}{names}")
        if self.classes:
            return facts | {"num_classes": len(self.class_names), "class_names": self.class_names}
        targets = self.encode_targets(self.table[self.target])[train].astype(np.float64)
        std = float(targets.std()) or 1.0
        return facts | {"target_mean": float(targets.mean()), "target_std": std}

    @cached_property
    def inputs(self) -> NDArray[np.float32]:
        """All rows of ``file`` as one matrix (N, F)."""
        return encode(self.table, self.facts["columns"], f"data.file={self.file}")

    def make_dataset(self, split: str) -> ArrayDataset:
        """Make the data set of a split; predict.py reads ``predict_file`` or the test rows."""
        is_new = split == "predict" and self.predict_file is not None
        if is_new or (split in ("test", "predict") and self.test_file is not None):
            key = "predict_file" if is_new else "test_file"
            table, source = self.read(key), f"data.{key}={getattr(self, key)}"
            inputs, rows = encode(table, self.facts["columns"], source), np.arange(table.height)
        else:
            source, table, inputs = f"data.file={self.file}", self.table, self.inputs
            rows = self.rows["test" if split == "predict" else split]
            if split != "train":
                self.warn_if_changed(self.checksum)
        targets = None
        if not is_new:
            column = select(table, [self.target], source)[self.target]
            targets = self.encode_targets(column, self.facts.get("class_names", ()))
        ignored = [name for name in self.ignore if name in table.columns]
        columns = {name: table[name][rows].to_list() for name in ignored}
        return ArrayDataset(inputs, targets, rows, {"row": rows.tolist(), **columns})
