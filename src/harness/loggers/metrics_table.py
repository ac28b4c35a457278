import csv
import io
import os
import time
import zlib
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
        self.contents = no_contents()  # what this run has written
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

    def _write(self, new: list[dict[str, Any]]) -> None:
        if not new:
            return
        rows = [{name: str(v) for name, v in row.items() if v is not None} for row in new]
        old: list[str] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                old = next(csv.reader(file), [])
        columns = list(dict.fromkeys(name for row in [old or ["step"], *rows] for name in row))
        if columns == old:
            size = self.path.stat().st_size
            try:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, columns).writerows(rows)
            except OSError:  # a full disk: all rows are written where there is room again
                os.truncate(self.path, size)
                raise
        else:  # This changes the rows above it, which happens in the first epochs only.
            above: list[Any] = []
            if old:
                with self.path.open(newline="") as file:
                    above = list(csv.DictReader(file))
            write_durably(self.path, text_of(columns, [*above, *rows]))
        self.contents["columns"] = list(dict.fromkeys([*self.contents["columns"], *columns]))
        self.contents["rows"] += [key_of(row) for row in rows]


def read(path: Path) -> list[dict[str, float]]:
    """The rows of a table, each without the columns that it leaves empty."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def no_contents() -> dict[str, Any]:
    """What a checkpoint records of a table without rows.

    Of each row it gets the step and a checksum, which stay the same where a column is added.
    """
    return {"columns": [], "rows": []}


def key_of(row: dict[str, str]) -> tuple[float | None, int]:
    """The step of a row, and a checksum of its cells that are not empty, in any order."""
    return number(row.get("step", "")), zlib.crc32(repr(sorted(row.items())).encode())


def number(text: str) -> float | None:
    """A cell's number, or ``None`` where it holds none."""
    try:
        return float(text)
    except ValueError:
        return None


def lines_of(path: Path) -> list[list[str]]:
    """The cells of each line of a table, which may be damaged, or missing."""
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    return [cells_of(line.removesuffix("\r")) for line in text.replace("\0", "").split("\n")]


def cells_of(line: str) -> list[str]:
    """The cells of one line; none where it cannot be read."""
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line]))
    except csv.Error:
        return []


def row_of(columns: list[str], cells: list[str]) -> dict[str, str]:
    """The cells of a row that are not empty."""
    return {name: cell for name, cell in zip(columns, cells, strict=False) if cell}


def text_of(columns: list[str], rows: list[dict[str, str]]) -> bytes:
    """A whole table."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns, extrasaction="ignore")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()
