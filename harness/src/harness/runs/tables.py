"""Runs on the screen, as JSON or as CSV."""

import csv
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.errors import UserError
from harness.names import flat
from harness.places import shown
from harness.runs.comparing import ABOUT, REPEATS, Group, differing, groups, score_of, value_of
from harness.runs.reading import RunFiles

FACTS = ("status", "started", "seconds", "samples/s", "held back by", "commit", "tags", "notes")
COLOURS = {"finished": "green", "running": "cyan", "failed": "red", "damaged": "red"}
EMPTY: tuple[Any, ...] = (None, "", [])
MOST_SETTINGS = 8  # columns on the screen; JSON and CSV have all


def columns_of(runs: Sequence[RunFiles], is_whole: bool) -> list[str]:
    """What a list of runs shows: facts, what tests have reached, and where settings differ."""
    tested = dict.fromkeys(n for run in runs for n in run.metrics if n.startswith("test/"))
    settings = differing(runs)
    if is_whole:
        return [*ABOUT, *tested, *settings]
    names, always = ["run", *FACTS, "best", *tested, *settings[:MOST_SETTINGS]], ("run", "status")
    return [n for n in names if n in always or any(value_of(r, n) not in EMPTY for r in runs)]


def print_list(runs: Sequence[RunFiles], form: str = "table") -> None:
    """Print runs with what they differ in.

    Args:
        runs: in the order of the rows.
        form: ``table``, ``json`` or ``csv``.
    """
    names = columns_of(runs, is_whole=form != "table")
    write([{name: value_of(run, name) for name in names} for run in runs], form)
    if form != "table":
        return
    for run in runs:
        if run.reason:
            console().print(f"{escape(shown(run.folder))}: {run.status}, {escape(run.reason)}")
    _tell_left_out(len(differing(runs)))


def print_best(runs: Sequence[RunFiles], key: str, is_max: bool, form: str = "table") -> None:
    """Print groups of runs that differ in their seed or fold alone, the best first.

    Raises:
        UserError: if no run has the value.
    """
    found = groups(runs, key, is_max)
    if not found:
        raise UserError(f"None of {len(runs)} runs has a value of {key}.")
    listed = [run for group in found for run in group.runs]
    settings = [name for name in differing(listed) if name not in REPEATS]
    num_shown = MOST_SETTINGS if form == "table" else len(settings)
    write([_row(group, settings[:num_shown], is_max) for group in found], form)
    if form == "table":
        _tell_left_out(len(settings))


def _tell_left_out(num_settings: int) -> None:
    if num_settings > MOST_SETTINGS:
        left_out = num_settings - MOST_SETTINGS
        print(f"{left_out} more settings differ: --json and --csv have them.")


def _row(group: Group, settings: Sequence[str], is_max: bool) -> dict[str, Any]:
    first = group.runs[0]
    row: dict[str, Any] = {group.key: group.mean, "± 95 %": group.interval}
    row["runs"] = len(group.runs)
    row |= {name: first.settings.get(name) for name in settings}
    best = (max if is_max else min)(group.runs, key=lambda run: score_of(run, group.key))
    return row | {"best run": str(best.folder)}


def print_difference(one: RunFiles, two: RunFiles, form: str = "table") -> None:
    """Print in which settings, metrics and facts two runs differ."""
    keys = dict.fromkeys([*differing([one, two]), *one.metrics, *two.metrics])
    rows = [
        {"": key, "one": a, "two": b}
        for key in (*keys, "status", "seconds", "samples/s", "commit")
        if (a := value_of(one, key)) != (b := value_of(two, key))
    ]
    if form == "table":
        if not rows:
            print("Their settings and what they have reached are the same.")
            return
        print(f"one is {shown(one.folder)}, two is {shown(two.folder)}")
    write(rows, form)


def print_one(run: RunFiles, form: str = "table") -> None:
    """Print all that is known of a run."""
    facts = {name: value_of(run, name) for name in ABOUT} | _made_by(run)
    facts |= run.metrics | run.settings
    if form != "table":
        write([facts], form)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in facts.items():
        if value not in EMPTY:
            table.add_row(f"[bold]{escape(name)}[/bold]", escape(text(name, value)))
    console().print(table)


def _made_by(run: RunFiles) -> dict[str, Any]:
    """How it was started the first time, with which code, and how often; checksums of its data."""
    starts = run.record.get("starts") or [{}]
    facts = {"words": run.words, **starts[0], "starts": len(starts)}
    code = facts.pop("code", {})
    for name, found in (
        ("packages", code.get("packages", {})),
        ("sources (crc32)", code.get("sources", {})),
        ("data (crc32)", flat(run.record.get("data", {}))),
    ):
        facts[name] = ", ".join(f"{key} {value}" for key, value in found.items())
    if "gpus" in facts:
        facts["gpus"] = ", ".join(facts["gpus"])
    return {name: value for name, value in facts.items() if name not in ("time", "commit")}


def write(rows: Sequence[dict[str, Any]], form: str) -> None:
    """Write rows as a table for a person, or for a program.

    What is not a finite number is null in JSON.
    """
    if form == "json":
        print(json.dumps([{k: _plain(v) for k, v in row.items()} for row in rows], indent=2))
    elif form == "csv" and rows:
        writer = csv.DictWriter(sys.stdout, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    elif rows:
        table, short = Table(box=None, pad_edge=False), short_names([*rows[0]])
        for name in rows[0]:
            is_right = any(isinstance(row[name], (int, float)) for row in rows)
            table.add_column(short[name], justify="right" if is_right else "left", overflow="fold")
        for row in rows:
            # In a table of differences the first column, "", names what its row is about.
            about = {name: row.get("", name) if name else "" for name in row}
            cells = {name: escape(text(about[name], value)) for name, value in row.items()}
            if colour := COLOURS.get(row.get("status", "")):
                cells["status"] = f"[{colour}]{row['status']}[/{colour}]"
            table.add_row(*cells.values())
        console().print(table)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(name: str, value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return ""
    if name == "started":
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value))
    if name == "seconds":
        return duration(value)
    if name in ("run", "best run"):
        return shown(Path(value))
    if name == "held back by":
        return str(value).partition(";")[0].replace(" of the time waiting for data", "")
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name == "samples/s":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Seconds as 1 d 2 h, 3 h 4 min, 5 min 6 s or 7 s."""
    for size, name, small, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {name} {seconds % size // small:.0f} {smaller}"
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def short_names(names: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or as many as tell it from the others."""
    found = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            tail = ".".join(parts[-length:])
            others = [n for n in names if n != name and (n == tail or n.endswith(f".{tail}"))]
            if not others:
                break
        found[name] = tail
    return found


def console() -> Console:
    """As wide as the table where the output is a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 10_000)
