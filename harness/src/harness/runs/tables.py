"""Print runs for a person, as JSON or as CSV. In: a ``Table``. Out: lines on the screen."""

import csv
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import polars as pl
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from harness.names import flat
from harness.places import shown
from harness.runs.frame import Table, differing, leaf, table_of
from harness.runs.reading import FACTS, RunFiles

HIDDEN = ("reason", "peak MiB", "step", "objective", "mode")  # facts that a list leaves out
MOST_SETTINGS = 8  # columns on the screen; JSON and CSV have all


def print_list(table: Table, form: str = "table") -> None:
    """Print a row for each run: facts, results of tests, and the settings that differ.

    Args:
        table: in the order of the rows.
        form: ``table``, ``json`` or ``csv``.
    """
    frame, settings = table.frame, differing(table)
    tested = [name for name in table.metrics if name.startswith("test/")]
    names = [*FACTS, *tested, *settings]
    if form == "table":
        names = [name for name in names if name not in (*HIDDEN, *settings[MOST_SETTINGS:])]
        names = [name for name in names if frame[name].null_count() < len(frame)]
    write(frame.select(names).to_dicts(), form)
    if form == "table":
        for folder, status, reason in frame.select("run", "status", "reason").iter_rows():
            if reason:
                console().print(f"{escape(shown(folder))}: {status}, {escape(reason)}")
        _tell_left_out(settings)


def print_best(means: pl.DataFrame) -> None:
    """Print the groups of ``frame.groups``."""
    value, interval, count, *settings, run = means.columns
    names = (value, interval, count, *settings[:MOST_SETTINGS], run)
    write(means.select(names).to_dicts())
    _tell_left_out(settings)


def _tell_left_out(settings: Sequence[str]) -> None:
    if len(settings) > MOST_SETTINGS:
        print(f"{len(settings) - MOST_SETTINGS} more settings differ: --json and --csv have them.")


def print_difference(one: RunFiles, two: RunFiles, form: str = "table") -> None:
    """Print in which settings, metrics and facts two runs differ."""
    table = table_of([one, two])
    names = (*differing(table), *table.metrics, "status", "seconds", "samples/s", "commit")
    pairs = {name: table.frame[name].to_list() for name in names}
    rows = [{"": name, "one": a, "two": b} for name, (a, b) in pairs.items() if a != b]
    if form == "table" and not rows:
        print("Their settings and what they have reached are the same.")
    elif form == "table":
        print(f"one is {shown(one.folder)}, two is {shown(two.folder)}")
    write(rows, form)


def print_one(run: RunFiles, form: str = "table") -> None:
    """Print all that is known of a run: also how it was started, with which code and data."""
    starts = run.record.get("starts", [])
    made_by = (
        {"starts": len(starts)} | (starts or [{}])[0] | flat({"data": run.record.get("data", {})})
    )
    for name, values in made_by.pop("code", {}).items():  # versions, and checksums of files
        made_by[name] = ", ".join(f"{key} {value}" for key, value in values.items())
    row = table_of([run]).frame.row(0, named=True)
    facts = dict.fromkeys(FACTS) | made_by | row
    if form == "table":
        rows = [{"": name, "value": value} for name, value in facts.items()]
        write([row for row in rows if row["value"] not in (None, "", {}, [])])
    else:
        write([facts], form)


def write(rows: Sequence[dict[str, Any]], form: str = "table") -> None:
    """Write rows for a person or a program; what is not a finite number is null in JSON."""
    if form == "json":
        print(json.dumps([{k: _plain(v) for k, v in row.items()} for row in rows], indent=2))
    elif form == "csv" and rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        table = RichTable(box=None, pad_edge=False)
        for name, title in zip(rows[0], titles([*rows[0]]), strict=True):
            is_right = all(isinstance(row[name], (int, float, type(None))) for row in rows)
            table.add_column(title, justify="right" if is_right else "left", overflow="fold")
        for row in rows:
            # Where the first column, "", has names, they say what the row is about.
            cells = (text(row.get("", name) if name else "", row[name]) for name in row)
            table.add_row(*map(escape, cells))
        console().print(table)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def titles(names: Sequence[str]) -> list[str]:
    """Shorten each key to its last part, where no other key has that."""
    counts = Counter(map(leaf, names))
    return [leaf(name) if counts[leaf(name)] == 1 else name for name in names]


def text(name: str, value: Any) -> str:
    """Write a value as a person reads it."""
    if value is None:
        return ""
    if name in ("run", "best run"):
        return shown(value)
    if name == "started":
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if name == "seconds":  # as 0:00:07 or 1 day, 2:03:04
        return str(timedelta(seconds=round(value)))
    if name == "held back by":
        return str(value).partition(";")[0]
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def console() -> Console:
    """Make a console that is as wide as the table where the output is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
