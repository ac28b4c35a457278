"""Write a run's metrics to a CSV, one row per step and one column per metric."""

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

from harness.errors import UserError
from harness.files import write_durably
from harness.untrusted import table_bytes


class MetricsTable(Logger):
    """Write metrics to a CSV that a later test, or a run that goes on, adds to.

    Lightning's ``CSVLogger`` deletes the file of an earlier start.

    Args:
        path: the CSV.
    """

    name = version = ""  # parts of no path: the file has one of its own

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.rows: list[dict[str, Any]] = []  # not yet in the file
        self.written_time = time.monotonic()

    @property
    def experiment(self) -> Any:
        """Take every call and do nothing: modules send their pictures to all loggers."""
        return DummyLogger().experiment

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Leave them to config.yaml, which has all of them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add to the row of ``step``; rows before it are complete."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step})
        self.rows[-1].update(metrics)

    @rank_zero_only
    def save(self) -> None:
        """Write the complete rows, once a second: that takes longer than a small network's step."""
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
        """Write the last row as well: nothing is to come for its step."""
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
            except OSError:  # a full disk: all rows are written when there is room again
                os.truncate(self.path, size)
                raise
        else:  # a new column changes the rows above, which happens in the first epochs only
            write(self.path, [*dict.fromkeys([*columns, *added])], [*read(self.path)[1], *new])


def read(path: Path, num_rows: int | None = None) -> tuple[list[str], list[dict[str, str]]]:
    """Read the columns of a table, and its rows or the first of them; empty without a file."""
    if not path.exists():
        return [], []
    with path.open(newline="", errors="replace") as file:
        table = csv.DictReader(file)
        return list(table.fieldnames or []), list(islice(table, num_rows))


def cut(path: Path, num_rows: int) -> int:
    """Leave the first rows of a table, and the columns with a value in one of them.

    Returns:
        How many rows are left; 0 if they lack their steps.

    Raises:
        UserError: if the table is no regular file, or has more cells than are read.
    """
    try:
        text = io.StringIO(table_bytes(path).decode(errors="replace"), newline="")
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}. Remove it to go on without.") from error
    columns = next(csv.reader(text), [])
    used, num_left, start = set[int](), 0, text.tell()
    for row in islice(csv.reader(text), num_rows):
        used.update(i for i, cell in enumerate(row) if cell)
        num_left += 1
    text.seek(start)
    names = [name for i, name in enumerate(columns) if i in used]
    if num_left:
        rows = islice(csv.DictReader(text, columns, restkey=""), num_rows)
        write(path, names, rows)
    return num_left if "step" in names else 0


def write(path: Path, columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a whole table in the place of another; file names may be no valid Unicode."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns, extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
    write_durably(path, text.getvalue().encode(errors="surrogateescape"))
