"""Runs as one HTML page that needs nothing else: no network, no server, no other file.

The page's own text and scripts lie in ``page/``; plotly's Python package carries the script that
draws. All that runs say is one block of JSON, which the page shows as text and never as HTML.
"""

import html
import json
import math
import os
import time
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import replacing
from harness.places import shown
from harness.runs.comparing import differing, in_order, value_of
from harness.runs.pictures import pictures
from harness.runs.reading import METRICS, RunFiles, read_table
from harness.runs.tables import short_names

OURS = b'<meta name="generator" content="harness report of runs">'
SCRIPTS = ("page.js", "table.js", "plots.js", "chosen.js")
FACTS = (
    *("status", "reason", "started", "seconds", "samples/s", "held back by", "commit"),
    *("tags", "notes", "best"),
)
NUM_BUCKETS = 500  # of a curve; of each, the smallest and the largest value are kept
MOST_PICTURE_BYTES = 16_000_000  # of all runs; the best runs' come first
NUM_FIGURES = 6  # figures of a curve's values


def write_report(
    runs: Sequence[RunFiles], path: Path, is_forced: bool = False, is_max: bool = False
) -> None:
    """Write the page; a report that has the name is replaced.

    Args:
        runs: any, also damaged ones.
        path: of the HTML file.
        is_forced: replace another file as well.
        is_max: whether more of the runs' objective is better.

    Raises:
        UserError: plotly is not installed, or the path is taken by what is no report.
        OSError: the disk is full, or the system refuses to write.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder. Give a file: -o {path / 'report.html'}.")
    if path.exists() and not is_forced and OURS not in path.read_bytes()[:1000]:
        raise UserError(f"{path} is no report of runs, and is kept. --force replaces it.")
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "The report is drawn with plotly, which is not installed: pip install -e .[report]"
        ) from error
    best = in_order(runs, "best", is_reversed=is_max)
    page = page_of(data_of(best, is_max), str(get_plotlyjs()))
    with replacing(path) as file:
        file.write(page.encode(errors="replace"))  # a folder may be named by any bytes


def page_of(data: dict[str, Any], plotly: str) -> str:
    """The HTML of what ``data_of`` has collected, with a library's script in it."""
    folder = resources.files("harness.runs") / "page"
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # As JSON the same; as HTML nothing that could end the block or begin a comment.
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Template((folder / "page.html").read_text()).substitute(
        title=html.escape(f"{len(data['runs'])} runs of {data['place']}"),
        style=(folder / "style.css").read_text(),
        data=text,
        plotly=plotly,
        script="\n".join((folder / name).read_text() for name in SCRIPTS),
    )


def data_of(runs: Sequence[RunFiles], is_max: bool = False) -> dict[str, Any]:
    """All that the page shows, as plain values.

    Args:
        runs: in the order in which their pictures are kept.
        is_max: whether more of the runs' objective is better.
    """
    names = differing(runs)
    root = _common([run.folder for run in runs])
    room, found = MOST_PICTURE_BYTES, []
    for run in runs:
        images = pictures(run.folder) if room > 0 else {}
        room -= sum(map(len, images.values()))
        found.append(
            {
                "name": os.path.relpath(run.folder.resolve(), root),
                "folder": shown(run.folder),
                "objective": run.objective,
                "facts": {name: _plain(value_of(run, name)) for name in FACTS}
                | {"tags": ", ".join(value_of(run, "tags"))},
                "metrics": {name: _plain(value) for name, value in run.metrics.items()},
                "settings": {k: _plain(run.settings[k]) for k in names if k in run.settings},
                "curves": curves_of(run),
                "pictures": {name: b64encode(png).decode() for name, png in images.items()},
            }
        )
    return {
        "made": time.time(),
        "place": shown(root),
        "is_max": is_max,
        "most_points": 2 * NUM_BUCKETS,
        "has_all_pictures": room > 0,
        "settings": _columns(runs, names),
        "runs": found,
    }


def curves_of(run: RunFiles) -> dict[str, tuple[list[int], list[float | None]]]:
    """Steps and values of each metric that was logged more than once; gaps are ``None``."""
    table, found = read_table(run.folder / METRICS), {}
    for name in table.columns[1:]:
        points = table.select("step", name).drop_nulls().to_numpy()  # (N, 2)
        if len(points) > 1:
            steps, values = thinned(points[:, 0], points[:, 1])
            rounded = [float(f"{v:.{NUM_FIGURES}g}") if math.isfinite(v) else None for v in values]
            found[name] = ([int(step) for step in steps], rounded)
    return found


def thinned(steps: Any, values: Any, num_buckets: int = NUM_BUCKETS) -> tuple[Any, Any]:
    """At most two points of each bucket of a curve: those of its minimum and its maximum.

    Args:
        steps: array (N,).
        values: array (N,); not all need be finite.
        num_buckets: neighbours that are taken together, all of one size.
    """
    size = -(-len(values) // num_buckets)
    if size <= 2:
        return steps, values
    rest = -len(values) % size
    rows = np.pad(values, (0, rest), constant_values=np.nan).reshape(-1, size)
    finite = np.isfinite(rows)
    lowest = np.where(finite, rows, np.inf).argmin(axis=1)
    highest = np.where(finite, rows, -np.inf).argmax(axis=1)
    first = np.arange(len(rows)) * size
    kept = np.unique(np.concatenate([first + lowest, first + highest]))
    return steps[kept], values[kept]


def _columns(runs: Sequence[RunFiles], names: Sequence[str]) -> list[dict[str, Any]]:
    """Settings in which runs differ; those that are the same in every run are one column."""
    short, same = short_names(names), dict[str, list[str]]()
    for name in names:
        same.setdefault(repr([run.settings.get(name) for run in runs]), []).append(name)
    found = []
    for keys in same.values():
        first = min(keys, key=lambda key: key.count("."))
        found.append({"key": first, "short": short[first], "also": sorted({*keys} - {first})})
    return found


def _common(folders: Sequence[Path]) -> Path:
    """The folder that all are in; of one run the one above it."""
    return Path(os.path.commonpath([folder.resolve().parent for folder in folders]))


def _plain(value: Any) -> Any:
    """A value that JSON has; a number that is not finite by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
