from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.data.datamodule import tell
from harness.errors import UserError
from harness.tables.columns import CATEGORY, encoded, learn_columns
from harness.tables.reading import check_columns, read_table
from harness.tables.rows import Rows, SplitRows, checksum, scale_of
from harness.tables.targets import learn_classes, target_classes, target_numbers

if TYPE_CHECKING:
    import polars as pl

MISSING = ("NA", "N/A", "nan", "NaN", "null", "?")


class Table(SplitRows):
    """A CSV or parquet file with a column to predict from the others.

    A batch is one matrix (B, F) of 32 bits with its targets (B,). Its columns are numbers, scaled
    to mean 0 and deviation 1 over the training rows, with 0 where one is missing; then a mark for
    each column that has missing numbers in training; then codes of categories, from 1, and 0 where
    one is missing or unknown. Truth values and dates count as numbers. All of it is learnt from the
    training rows, and kept with the run: new rows are predicted without them.

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
        **kwargs: see ``SplitRows``.
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
        if missing_targets not in ("refuse", "drop"):
            raise UserError(f"data.missing_targets={missing_targets}: use refuse or drop.")
        self.file, self.target, self.classes = file, target, classes
        self.ignore, self.categories = several(ignore), several(categories)
        self.features = None if features is None else several(features)
        self.missing, self.separator = several(missing), separator
        if separator is not None and len(separator) != 1:
            raise UserError(f"data.separator={separator} must be one character.")
        if self.features is not None and len({*self.features}) < len(self.features):
            raise UserError(f"data.features={self.features} names a column twice.")
        self.drops_missing_targets = missing_targets == "drop"
        self.test_file, self.predict_file = test_file, predict_file
        if test_file is not None and self.fold is not None:
            raise UserError("data.fold and data.test_file both say what is tested: leave one out.")

    def learn(self) -> dict[str, Any]:
        """Sizes, scales and categories of the training rows."""
        with told_of(f"data.file={self.file}"):
            facts = learn_classes(self.table[self.target]) if self.classes else {}
            targets = self._targets(self.table[self.target], facts.get("class_names"))
            train = self.split(targets, facts.get("class_names"))["train"]
            if not self.classes:
                facts |= scale_of(targets[train])
            columns = learn_columns(self.table.drop(self.target), train, self.categories)
        categories = [column for column in columns if column["kind"] == CATEGORY]
        num_marks = sum(column.get("marks_missing", False) for column in columns)
        facts |= {
            "num_rows": len(targets),
            "checksum": checksum(targets),
            "in_features": len(columns) + num_marks,
            "num_numbers": len(columns) + num_marks - len(categories),
            "cardinalities": [len(column["values"]) + 1 for column in categories],
            "columns": columns,
        }
        tell(summary(self.file or "scikit-learn's table", facts))
        return facts

    def split(
        self, targets: NDArray[Any], class_names: list[str] | None
    ) -> dict[str, NDArray[np.int64]]:
        """See ``SplitRows``; what would be tested is trained on where a file is."""
        found = super().split(targets, class_names)
        if self.test_file is None:
            return found
        train = np.sort(np.concatenate([found["train"], found["test"]]))
        return {"train": train, "val": found["val"]}

    def make_dataset(self, split: str) -> Rows:
        """The rows of one split."""
        if split == "predict" and self.predict_file is not None:
            names = [column["name"] for column in self.facts["columns"]]
            table = self._read("data.predict_file", self.predict_file, names)
            with told_of(f"data.predict_file={self.predict_file}"):
                inputs = encoded(table, self.facts["columns"])
            return Rows(inputs, sample_columns=self._ignored(table))
        if split in ("test", "predict") and self.test_file is not None:
            return self._rows_of_test_file(self.test_file)
        positions = self.split_rows["test" if split == "predict" else split]
        about: dict[str, list[Any]] = {}
        if split == "predict":
            about = {"row": positions.tolist()}
            if self.file is not None and self.ignore:
                about |= self._ignored(self._read("data.file", self.file, self.ignore)[positions])
        return Rows(self.arrays["inputs"], self.arrays["targets"], positions, about)

    def _rows_of_test_file(self, path: str) -> Rows:
        names = [column["name"] for column in self.facts["columns"]]
        table = self._read("data.test_file", path, [*names, self.target])
        class_names = self.facts.get("class_names")
        with told_of(f"data.test_file={path}"):
            inputs = encoded(table, self.facts["columns"])
            targets = self._targets(table[self.target], class_names)
        known = np.flatnonzero(targets >= 0 if self.classes else ~np.isnan(targets))
        about = {"row": known.tolist(), **self._ignored(table[known])}
        return Rows(inputs, targets, known, about)

    def _ignored(self, table: "pl.DataFrame") -> dict[str, list[Any]]:
        """The columns that are not predicted from: by them rows are known."""
        return {name: table[name].to_list() for name in self.ignore if name in table.columns}

    def targets_of_rows(self) -> tuple[NDArray[Any], list[str] | None]:
        """See ``SplitRows``."""
        return self.arrays["targets"], self.facts.get("class_names")

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """All rows' ``inputs`` (N, F) and ``targets`` (N,)."""
        facts = self.facts
        with told_of(f"data.file={self.file}"):
            targets = self._targets(self.table[self.target], facts.get("class_names"))
            inputs = encoded(self.table, facts["columns"])
        del self.table  # its texts, which nobody needs any more
        return {"inputs": inputs, "targets": targets}

    @cached_property
    def table(self) -> "pl.DataFrame":
        """The file as it stands there, without the columns that are left out."""
        if self.file is None:
            return bundled(self.classes)
        named = [*self.ignore, *self.categories, *(self.features or ()), self.target]
        table = self._read("data.file", self.file, named)
        chosen = [name for name in self.features or table.columns if name not in self.ignore]
        chosen = [name for name in chosen if name != self.target]
        if not chosen or self.target in self.ignore:
            raise UserError(
                f"data.file={self.file} has no column left to predict {self.target} from.\n"
                "Look at data.ignore, data.features and data.target."
            )
        return table.select([*chosen, self.target])

    def _read(self, key: str, path: str, names: Sequence[str]) -> "pl.DataFrame":
        table = read_table(key, path, self.missing, self.separator)
        check_columns(key, path, names, table.columns)
        return table

    def _targets(self, column: "pl.Series", class_names: list[str] | None) -> NDArray[Any]:
        """Each row's class or number; -1 or NaN where it has none."""
        targets: NDArray[Any]
        if class_names is None:
            targets = target_numbers(column)
            is_missing = np.isnan(targets)
        else:
            targets = target_classes(column, class_names)
            is_missing = targets < 0
        if is_missing.all():
            raise UserError(f"data.target={self.target} has no value in any row.")
        if is_missing.any() and not self.drops_missing_targets:
            raise UserError(
                f"data.target={self.target} has no value in {is_missing.sum():,} of "
                f"{len(targets):,} rows, the first of them row {is_missing.argmax() + 1}.\n"
                "Leave these rows out with data.missing_targets=drop."
            )
        return targets


def bundled(classes: bool) -> "pl.DataFrame":
    """A table that comes with scikit-learn."""
    import polars as pl
    from sklearn.datasets import load_breast_cancer, load_diabetes

    data = load_breast_cancer() if classes else load_diabetes(scaled=False)
    columns = dict(zip(map(str, data.feature_names), data.data.T, strict=True))
    return pl.DataFrame(
        columns | {"target": data.target_names[data.target] if classes else data.target}
    )


def several(names: Sequence[str]) -> list[str]:
    """A list of names; ``data.ignore=id`` means ``[id]``."""
    return [names] if isinstance(names, str) else [str(name) for name in names]


@contextmanager
def told_of(source: str) -> Iterator[None]:
    """Say where the table that holds a mistake comes from."""
    try:
        yield
    except UserError as error:
        if str(error).startswith("data."):
            raise
        raise UserError(f"{source}: {error}") from error


def summary(source: str, facts: dict[str, Any]) -> str:
    """What was found in a table, in a line or two."""
    categories = [column for column in facts["columns"] if column["kind"] == CATEGORY]
    num_numbers = len(facts["columns"]) - len(categories)
    line = f"{source}: {facts['num_rows']:,} rows, {num_numbers} columns of numbers"
    if categories:
        sizes = [f"{column['name']} ({len(column['values'])})" for column in categories]
        line += f", categories {', '.join(sizes[:10])}{', ...' if len(sizes) > 10 else ''}"
    if "class_names" in facts:
        counts = zip(facts["class_names"], facts["class_counts"], strict=True)
        shown = [f"{name} ({count:,})" for name, count in counts]
        line += f"; classes {', '.join(shown[:10])}{', ...' if len(shown) > 10 else ''}"
    return line
