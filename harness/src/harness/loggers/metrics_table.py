"""Write a run's metrics to a CSV file with one row per step and one column per metric."""

import csv
import io
import os
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import DummyLogger, Logger
from pytorch_lightning.utilities import rank_zero_only

from harness.files import write_durably


class MetricsTable(Logger):
    """Write metrics to a CSV file, to which a later test or a resumed run adds rows.

    Lightning's ``CSVLogger`` would delete the file of an earlier start.

    Args:
        path: the CSV file.
    """

    name = version = ""  # Lightning builds paths from these; the file has its own path

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []  # rows that the file lacks
        self.written_time = time.monotonic()

    @property
    def experiment(self) -> Any:
        """Return an object that ignores all calls, such as those of modules that log pictures."""
        return DummyLogger().experiment

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Write nothing: config.yaml holds the hyper-parameters."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of ``step``. Earlier rows get no more metrics."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step})
        self.rows[-1].update(metrics)

    @rank_zero_only
    def save(self) -> None:
        """Write complete rows at most once a second: a write takes longer than a small step."""
        if time.monotonic() >= self.written_time + 1:
            self._write(self.rows[:-1])
            self.rows = self.rows[-1:]
            self.written_time = time.monotonic()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write all rows."""
        self.write_all()

    @rank_zero_only
    def write_all(self) -> None:
        """Write all rows, including the last one."""
        self._write(self.rows)
        self.rows = []

    def _write(self, new: list[dict[str, Any]]) -> None:
        if not new:
            return
        columns, _ = read(self.path, num_rows=0)
        added = dict.fromkeys(name for row in [{"step": 0}, *new] for name in row)
        if {*added} <= {*columns}:
            size = self.path.stat().st_size
            try:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, columns).writerows(new)
            except OSError:  # on a full disk, remove a partial row; a later call writes all rows
                os.truncate(self.path, size)
                raise
        else:  # a new column changes all rows, but only the first epochs add columns
            write(self.path, [*dict.fromkeys([*columns, *added])], [*read(self.path)[1], *new])


def read(path: Path, num_rows: int | None = None) -> tuple[list[str], list[dict[str, str]]]:
    """Return a table's columns, and all or the first rows; both are empty without a file."""
    if not path.exists():
        return [], []
    with path.open(newline="", errors="replace") as file:
        table = csv.DictReader(file)
        return list(table.fieldnames or []), list(islice(table, num_rows))


def cut(path: Path, num_rows: int) -> int:
    """Keep only the first rows of a table, and the columns that have a value in these rows.

    Returns:
        The number of rows that remain; 0 if the table has no column ``step``.
    """
    if not path.exists():
        return 0
    used, num_left = set[int](), 0
    with path.open(newline="", errors="replace") as file:
        table = csv.reader(file)
        columns = next(table, [])
        for row in islice(table, num_rows):
            used.update(i for i, cell in enumerate(row) if cell)
            num_left += 1
    names = [name for i, name in enumerate(columns) if i in used]
    if num_left:
        with path.open(newline="", errors="replace") as file:
            write(path, names, islice(csv.DictReader(file, restkey=""), num_rows))
    return num_left if "step" in names else 0


def write(path: Path, columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a table, and replace the old file; texts may contain invalid Unicode, as paths do."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns, extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
    write_durably(path, text.getvalue().encode(errors="surrogateescape"))
