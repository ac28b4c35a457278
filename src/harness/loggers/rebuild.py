"""Brings back what one of a run's logs has lost from the other, and says what neither has."""

import itertools
import logging
import os
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.files import write_durably
from harness.loggers import event_files, metrics_table
from harness.loggers.event_files import Record

log = logging.getLogger(__name__)

Rows = list[dict[str, str] | None]  # of the table; None where one is lost

NUM_SPELLINGS = 1024  # that are tried for a row, until its checksum holds
NUM_SHOWN = 5  # tags of one message


@dataclass
class File:
    """One of TensorBoard's files.

    Attributes:
        state: what the checkpoint tells of it: see ``event_files.read_on``.
        path: where it is, or was.
        is_whole: whether it begins with what the checkpoint tells of.
        records: what was in it when the checkpoint was written, as far as it was looked for.
    """

    state: dict[str, Any]
    path: Path
    is_whole: bool
    records: list[Record] = field(default_factory=list)

    def read(self, step: int) -> None:
        """Look for its records; those that the run will log again are none of them."""
        records = event_files.read_events(self.path) if self.path.exists() else []
        length = self.state["length"]
        end = sum(record.end <= length for record in records)
        if not any(length in (record.start, record.end) for record in records):
            # Something was put in or taken out, so that the length tells no place any more.
            while end and records[end - 1].event.step >= step:
                end -= 1
            while end < len(records) and records[end].event.step < step:
                end += 1
        self.records = records[:end]

    def write(self) -> None:
        """Let it hold its records and nothing else."""
        if not self.is_whole:
            write_durably(self.path, b"".join(record.raw for record in self.records))
        elif self.state["length"] < self.path.stat().st_size:
            os.truncate(self.path, self.state["length"])


def bring_back_rows(
    path: Path,
    contents: dict[str, Any],
    rows: Rows,
    damaged: list[dict[str, str]],
    files: list[File],
) -> None:
    """Fill in the rows of the table that are lost, and tell of them.

    TensorBoard keeps single precision. A row's checksum tells whether that was all of it.

    Args:
        path: of the table.
        contents: of the table: see ``metrics_table.no_contents``.
        rows: those that are whole, at their places.
        damaged: what else the table's lines may hold.
        files: TensorBoard's, which have been read.
    """
    if None not in rows:
        return
    logged = rows_logged(files, contents["columns"])
    parts = defaultdict[Any, list[dict[str, str]]](list)
    for row in damaged:
        parts[metrics_table.number(row.get("step", ""))].append(row)
    missing, lost, num_rounded, num_before = [], [], 0, Counter[Any]()
    for place, (step, checksum) in enumerate(contents["rows"]):
        nth = num_before[step]  # of the rows of this step
        num_before[step] += 1
        if rows[place] is not None:
            continue
        missing.append(step)
        if nth < len(logged[step]):
            row, is_exact = row_back(step, logged[step][nth], parts[step], checksum)
            rows[place] = row
            num_rounded += not is_exact
        else:
            lost.append(step)
    said = [f"{told(missing)} of {path} were damaged or missing"]
    if num_back := len(missing) - len(lost):
        rounded = f", {num_rounded} of them in single precision" if num_rounded else ""
        said.append(f"{num_back} came back from TensorBoard's files{rounded}")
    if lost:
        said.append(f"lost: {told(lost)}")
    log.warning("%s.", "; ".join(said))


def told(found: list[Any]) -> str:
    """How many rows, and of which steps."""
    known = [step for step in found if step is not None]
    where = f" (steps {min(known):.0f} to {max(known):.0f})" if known else ""
    return f"{len(found)} row(s){where}"


def rows_logged(files: list[File], columns: list[str]) -> dict[Any, list[dict[str, float]]]:
    """The rows of each step that a table with these columns would have."""
    found = defaultdict[Any, list[dict[str, float]]](list)
    for file in files:
        last = None
        for record in file.records:
            values = event_files.scalars(record.event)
            cells = {tag: value for tag, value in values.items() if tag in columns}
            if cells and record.event.step != last:
                last = record.event.step
                found[last].append({})
            if cells:
                found[last][-1].update(cells)
    return found


def row_back(
    step: float, logged: dict[str, float], parts: list[dict[str, str]], checksum: int
) -> tuple[dict[str, str], bool]:
    """A row from what TensorBoard has, and whether it is what the checksum tells of.

    Args:
        step: of the row.
        logged: by TensorBoard, in single precision.
        parts: damaged rows of this step, whose cells count where TensorBoard has the same.
        checksum: of the row.
    """
    choices = {"step": [f"{step:.0f}", str(step)]}
    for tag, value in logged.items():
        written = [part[tag] for part in parts if same(part.get(tag, ""), value)]
        whole = [str(int(value))] if value.is_integer() else []
        choices[tag] = list(dict.fromkeys([*written, *whole, str(value), str(np.float32(value))]))
    spellings = itertools.product(*choices.values())
    for cells in itertools.islice(spellings, NUM_SPELLINGS):
        row = dict(zip(choices, cells, strict=True))
        if metrics_table.key_of(row)[1] == checksum:
            return row, True
    return {name: texts[0] for name, texts in choices.items()}, False


def same(text: str, value: float) -> bool:
    """Whether a cell's number is a value of single precision."""
    number = metrics_table.number(text)
    return number is not None and single(number) == single(value)


def single(value: float) -> str:
    """A number in single precision; as a text, because NaN equals nothing."""
    with np.errstate(over="ignore"):
        return str(np.float32(value))


def bring_back_events(rows: Rows, files: list[File]) -> None:
    """Fill in the scalars that TensorBoard's files have lost, and tell of what else they have.

    Args:
        rows: of the table, which has no pictures, texts and histograms.
        files: all of them, which have been read, the oldest first.
    """
    absent = [Counter[str]() for _ in files]
    places = defaultdict[Any, list[tuple[int, int]]](list)
    wall_time = time.time()  # of what nothing is known before
    for nth, file in enumerate(files):
        if file.records:
            wall_time = file.records[0].event.wall_time
        if not any(record.event.HasField("file_version") for record in file.records[:1]):
            first = event_files.record_of(wall_time=wall_time, file_version="brain.Event:2")
            file.records.insert(0, first)
        there = event_files.count_values((record.event for record in file.records), {})
        for tag, (num, _) in file.state["values"].items():
            absent[nth][tag] = num - there.get(tag, (0, None))[0]
        for place, record in enumerate(file.records):
            for tag, value in event_files.scalars(record.event).items():
                places[record.event.step, tag, single(value)].append((nth, place))
    put_behind = defaultdict[tuple[int, int], list[Record]](list)
    num_back, here = Counter[int](), (0, 0)
    for step, tag, value in logged_cells(rows):
        if found := places[step, tag, single(value)]:
            here = max(here, found.pop(0))
            wall_time = files[here[0]].records[here[1]].event.wall_time
            continue
        # Into the next file that has lost a value of this tag.
        for nth in range(here[0], len(files)):
            if absent[nth][tag] > 0:
                summary = {"value": [{"tag": tag, "simple_value": value}]}  # as add_scalar's
                record = event_files.record_of(wall_time=wall_time, step=step, summary=summary)
                here = here if here[0] == nth else (nth, 0)
                put_behind[here].append(record)
                absent[nth][tag] -= 1
                num_back[nth] += 1
                break
    for nth, file in enumerate(files):
        if file.is_whole:
            continue
        old = enumerate(file.records)
        file.records = [one for place, each in old for one in (each, *put_behind[nth, place])]
        tell_of(file.path, num_back[nth], +absent[nth])


def tell_of(path: Path, num_back: int, lost: Counter[str]) -> None:
    """Say what a file of TensorBoard has lost."""
    said = [f"{path} was damaged or missing"]
    if num_back:
        said.append(f"{num_back} value(s) came back from metrics.csv")
    if lost:
        shown = ", ".join(f"{num} of {tag}" for tag, num in lost.most_common(NUM_SHOWN))
        more = f" and of {len(lost) - NUM_SHOWN} other tags" if len(lost) > NUM_SHOWN else ""
        said.append(f"lost: {shown}{more}")
    if len(said) > 1:
        log.warning("%s.", "; ".join(said))


def logged_cells(rows: Rows) -> list[tuple[int, str, float]]:
    """Step, name and value of every number in a table, in the order in which they were logged."""
    found = []
    for row in rows:
        cells = {name: metrics_table.number(text) for name, text in (row or {}).items()}
        step = cells.pop("step", None)
        if step is not None:
            found += [(int(step), name, v) for name, v in cells.items() if v is not None]
    return found
