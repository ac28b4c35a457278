"""Print frames of runs for a person or a program. In: a ``Table``. Out: lines on the screen."""

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import polars as pl

from harness.names import shown
from harness.runs.frame import Table, differing, leaf, table_of
from harness.runs.reading import RunFiles

HIDDEN = ("reason", "objective", "mode")  # facts that a list leaves out
MOST_SETTINGS = 8  # columns on the screen; JSON has all


def print_list(table: Table, as_json: bool = False) -> None:
    """Print a row for each run: facts, results of tests, and the settings that differ."""
    settings, frame = differing(table), table.frame
    tested = [name for name in table.metrics if name.startswith("test/")]
    if as_json:
        show(frame.select(*table.facts, *tested, *settings), as_json)
        return
    names = [name for name in table.facts if name not in HIDDEN] + tested + settings[:MOST_SETTINGS]
    show(frame.select(name for name in names if frame[name].null_count() < len(frame)))
    for folder, status, reason in frame.select("run", "status", "reason").iter_rows():
        if reason:
            print(f"{shown(folder)}: {status}, {reason}")
    if len(settings) > MOST_SETTINGS:
        print(f"{len(settings) - MOST_SETTINGS} more settings differ: --json has them.")


def print_difference(one: RunFiles, two: RunFiles, as_json: bool = False) -> None:
    """Print in which settings, metrics and facts two runs differ."""
    table = table_of([one, two])
    names = (*differing(table), *table.metrics, "status", "seconds", "samples/s", "commit")
    rows = [(name, *table.frame[name]) for name in names]
    rows = [(name, str(a), str(b)) for name, a, b in rows if a != b]
    if not as_json:
        same = "" if rows else "\nTheir settings and what they have reached are the same."
        print(f"one is {shown(one.folder)}, two is {shown(two.folder)}{same}")
    show(pl.DataFrame(rows, ["name", "one", "two"], orient="row"), as_json)


def print_one(run: RunFiles, as_json: bool = False) -> None:
    """Print all that is known of a run: also how it was started, with which code and data."""
    starts = run.record.get("starts") or [{}]
    facts = table_of([run]).frame.row(0, named=True)
    facts |= run.record | starts[-1] | {"starts": len(starts)}
    rows = [(name, str(value)) for name, value in facts.items() if value not in (None, "", {}, [])]
    show(pl.DataFrame(rows, ["name", "value"], orient="row"), as_json)


def show(frame: pl.DataFrame, as_json: bool = False) -> None:
    """Print a frame, for a person with short names and numbers."""
    if as_json:
        print(frame.write_json())
    elif len(frame):
        rows = [titles(frame.columns)]
        rows += [[*map(text, frame.columns, row)] for row in frame.iter_rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(map(str.ljust, row, widths)).rstrip())


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
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
