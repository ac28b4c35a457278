import csv
import io
import time
from pathlib import Path
from typing import Any

from lightning_fabric.loggers.logger import rank_zero_experiment
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from harness.files import write_durably


class MetricsTable(Logger):
    """Write metrics to a CSV with one row per step and one column per metric.

    Unlike Lightning's ``CSVLogger`` it continues a file that is there, so that a test after
    training, or a run that goes on, adds to the table instead of replacing it.

    Args:
        path: the CSV.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.columns: list[str] = ["step"]
        self.rows: list[dict[str, Any]] = []  # not yet in the file
        self.written = time.monotonic()

    @property
    def name(self) -> str:
        """Part of no path: the file has one of its own."""
        return ""

    @property
    def version(self) -> str:
        """Part of no path: the file has one of its own."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> "MetricsTable":
        """Itself; other processes get an object that ignores calls."""
        return self

    @rank_zero_only
    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
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
        if time.monotonic() >= self.written + 1:
            self._write(self.rows[:-1])
            self.rows = self.rows[-1:]
            self.written = time.monotonic()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write all rows."""
        self.write_all()

    @rank_zero_only
    def write_all(self) -> None:
        """Write the last row as well: nothing is to come for its step."""
        self._write(self.rows)
        self.rows = []

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        before: list[dict[str, Any]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                self.columns = list(reader.fieldnames or self.columns)
                if any(row.keys() - set(self.columns) for row in rows):
                    before = list(reader)
        new = [name for row in rows for name in row if name not in self.columns]
        self.columns += dict.fromkeys(new)
        # A new column changes the rows above it, which happens in the first epochs only.
        rewrite = bool(new) or not self.path.exists()
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self.columns)
        if rewrite:
            table.writeheader()
            table.writerows(before)
        table.writerows(rows)
        if rewrite:
            write_durably(self.path, text.getvalue().encode())
        else:
            with self.path.open("a", newline="") as file:
                file.write(text.getvalue())


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a table, each without the columns that it leaves empty."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
