import csv
import io
import time
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import DummyLogger, Logger
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
        self.rows: list[dict[str, Any]] = []  # not yet in the file
        self.written = time.monotonic()

    @property
    def name(self) -> str:
        """Part of no path: the file has one of its own."""
        return ""

    version = name

    @property
    def experiment(self) -> Any:
        """Takes every call and does nothing: modules send their pictures to all loggers."""
        return DummyLogger().experiment

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
        old: list[str] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                old = next(csv.reader(file), [])
        columns = list(dict.fromkeys(name for row in [old or ["step"], *rows] for name in row))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, columns)
        if columns == old:
            table.writerows(rows)
            with self.path.open("a", newline="") as file:
                file.write(text.getvalue())
            return
        # A new column changes the rows above it, which happens in the first epochs only.
        table.writeheader()
        if old:
            with self.path.open(newline="") as file:
                table.writerows(csv.DictReader(file))
        table.writerows(rows)
        write_durably(self.path, text.getvalue().encode())


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a table, each without the columns that it leaves empty."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]
