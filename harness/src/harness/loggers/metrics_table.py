import csv
import io
import logging
import os
import time
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import DummyLogger, Logger
from pytorch_lightning.utilities import rank_zero_only

from harness.files import write_durably

log = logging.getLogger(__name__)


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


def end_of(path: Path) -> tuple[int, str]:
    """How many rows a table has that ``MetricsTable`` has written, and the step of the last."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return (len(lines) - 1, lines[-1].partition(b",")[0].decode()) if len(lines) > 1 else (0, "")


def cut(path: Path, num: int, last_step: str) -> None:
    """Leave the first rows of a table, and the columns that have a value there.

    Damaged ones go as well, which is told; the table is then kept as it was beside it.

    Args:
        path: of the table.
        num: of the rows that stay.
        last_step: of the last of them: where rows are missing, later ones have moved up.
    """
    if num == 0:
        path.unlink(missing_ok=True)
        return
    text = path.read_bytes().decode(errors="replace") if path.exists() else ""
    first, *lines = text.replace("\0", "").replace("\r\n", "\n").split("\n")[: num + 1]
    head = columns_in(first)
    whole = (dict(zip(head, line.split(","), strict=False)) for line in lines if line)
    rows = [{k: v for k, v in row.items() if v} for row in whole if is_whole(row, head)]
    steps = [row["step"] for row in rows]
    if last_step in steps:
        rows = rows[: len(steps) - steps[::-1].index(last_step)]
    if len(rows) < num or rows[-1]["step"] != last_step:
        left = f"{len(rows)} of its {num} rows before the checkpoint are left"
        log.warning("%s is damaged: %s.", path, left)
        if path.exists():
            path.replace(path.with_name(f"{path.name}.damaged"))
    new = text_of([name for name in head if any(name in row for row in rows)], rows)
    if rows and (not path.exists() or path.read_bytes() != new):
        write_durably(path, new)


def columns_in(line: str) -> list[str]:
    """The names in a table's first line; none where it cannot be read."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def is_whole(row: dict[str, str], columns: list[str]) -> bool:
    """Whether a row has a cell for each column, and a step."""
    try:
        return len(row) == len(columns) and float(row["step"]) >= 0
    except (KeyError, ValueError):
        return False


def text_of(columns: list[str], rows: list[dict[str, str]]) -> bytes:
    """A whole table."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns)
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()
