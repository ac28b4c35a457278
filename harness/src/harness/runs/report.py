"""Runs as one HTML page that needs nothing else: plotly's figures, pictures and a table."""

import math
import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.files import replacing
from harness.places import shown
from harness.runs.comparing import differing, in_order, value_of
from harness.runs.reading import METRICS, RunFiles, read_table
from harness.runs.tables import EMPTY, short_names, text

OURS = b'<meta name="generator" content="harness report of runs">'
# The policy forbids the browser every request; plotly's script needs the two exceptions.
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="harness report of runs">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:;
 form-action 'none'; base-uri 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem 2rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; white-space: nowrap }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd }
td.number { text-align: right; font-variant-numeric: tabular-nums }
figure { display: inline-block; margin: 0 1rem 1rem 0 } img { max-width: 24rem; display: block }
</style>
"""
COLOURS = ("#2f6fde", "#e07b00", "#1f9d55", "#d43d51", "#8a5cd6", "#9c6b4e", "#d65db1", "#7a828e")
FACTS = ("seconds", "samples/s", "held back by", "started", "tags", "notes", "commit", "reason")
# By name, because plotly's own choice has a button that sends the chart away.
BUTTONS = ["toImage", "zoom2d", "pan2d", "autoScale2d"]
CONFIG = {"displaylogo": False, "modeBarButtons": [BUTTONS]}
NUM_BUCKETS = 250  # of a curve; of each, the smallest and the largest value are kept
MOST_PICTURE_BYTES = 16_000_000  # of all runs; the best runs' come first
MOST_IN_LEGEND = 25


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
        import plotly.io  # noqa: F401
    except ImportError as error:
        raise UserError(
            "The report is drawn with plotly, which is not installed: pip install -e .[report]"
        ) from error
    page = "\n".join(parts_of(in_order(runs, "best", is_reversed=is_max)))
    with replacing(path) as file:
        file.write(page.encode(errors="replace"))  # a folder may be named by any bytes


def parts_of(runs: Sequence[RunFiles]) -> Iterator[str]:
    """The page in pieces, the best run first; what a run says is escaped, in figures as well."""
    from plotly.io import to_html

    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    names = [escape(os.path.relpath(run.folder.resolve(), root)) for run in runs]
    title = escape(f"{len(runs)} runs of {shown(root)}")
    yield f"{HEAD}<title>{title}</title></head><body><h1>{title}</h1>"
    yield from table_of(runs, names)
    script = True  # of plotly, once
    for heading, figure in (
        ("Learning curves", curves_of(runs, names)),
        ("Metric against settings", scatter_of(runs, names)),
    ):
        if figure["data"]:
            figure["layout"] |= {"height": 480, "hovermode": "closest"}
            yield f"<h2>{heading}</h2>"
            yield to_html(figure, CONFIG, False, script, False, validate=False)
            script = False
    room = MOST_PICTURE_BYTES
    for run, name in zip(runs, names, strict=True):
        images = pictures(run.folder) if room > 0 else {}
        room -= sum(map(len, images.values()))
        if images:
            yield f"<h2>Pictures of {name}</h2>"
        for key, png in images.items():
            source = f"data:image/png;base64,{b64encode(png).decode()}"
            yield f'<figure><img src="{source}"><figcaption>{escape(key)}</figcaption></figure>'
    yield "</body></html>" if room > 0 else "<p>Other runs have more pictures.</p></body></html>"


def pictures(run_dir: Path) -> dict[str, bytes]:
    """The newest picture of each name that a run has sent to TensorBoard, as a PNG.

    What is damaged, or is still being written, is left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    newest: dict[str, tuple[int, bytes]] = {}
    for folder in {path.parent for path in run_dir.glob("tensorboard/**/events.out.tfevents.*")}:
        events = EventAccumulator(str(folder), {"images": 1, "scalars": 1, "histograms": 1})
        with suppress(OSError):
            events.Reload()
        for name in events.Tags()["images"]:
            event = events.Images(name)[-1]
            if name not in newest or event.step >= newest[name][0]:
                newest[name] = (event.step, event.encoded_image_string)
    return {name: data for name, (_, data) in newest.items()}


def table_of(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    """One row for each run: status, results, the settings that differ, facts."""
    tested = dict.fromkeys(n for run in runs for n in run.metrics if n.startswith("test/"))
    columns = ["status", "best", *tested, *differing(runs), *FACTS]
    columns = [key for key in columns if any(value_of(run, key) not in EMPTY for run in runs)]
    short = short_names(columns)
    titles = "".join(f'<th title="{escape(key)}">{escape(short[key])}</th>' for key in columns)
    yield f'<div class="wide"><table><thead><tr><th>run</th>{titles}</tr></thead><tbody>'
    for run, name in zip(runs, names, strict=True):
        values = {key: value_of(run, key) for key in columns}
        cells = "".join(
            f"<td{' class=number' * is_number(value)}>{escape(text(key, value))}</td>"
            for key, value in values.items()
        )
        yield f"<tr><td>{name}</td>{cells}</tr>"
    yield "</tbody></table></div>"


def curves_of(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    """A figure of each metric that was logged more than once, with a menu of metrics."""
    traces: dict[str, list[dict[str, Any]]] = {}
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        table = read_table(run.folder / METRICS)
        for metric in table.columns[1:]:
            points = table.select("step", metric).drop_nulls().to_numpy()  # (N, 2)
            if len(points) > 1:
                steps, values = thinned(points[:, 0], points[:, 1])
                trace = {"x": steps, "y": values.astype(np.float32), "name": name, "visible": False}
                trace |= {"line": {"color": COLOURS[i % len(COLOURS)]}, "mode": "lines+markers"}
                traces.setdefault(metric, []).append(trace)
    objectives = [run.objective for run in runs]
    metrics = sorted(traces, key=lambda metric: metric not in objectives)
    for trace in traces[metrics[0]] if metrics else []:
        trace["visible"] = True
    choices = []
    for metric in metrics:
        seen = {"visible": [metric == own for own in metrics for _ in traces[own]]}
        choices.append(_choice(metric, seen, {"yaxis.title.text": escape(metric)}))
    scales = [_choice(scale, {}, {"yaxis.type": scale}) for scale in ("linear", "log")]
    layout: dict[str, Any] = {"showlegend": 1 < len(runs) <= MOST_IN_LEGEND}
    layout |= {"xaxis": _axis("step"), "yaxis": _axis(*metrics[:1] or [""])}
    layout["updatemenus"] = [_menu(choices, 0), _menu(scales, 0.4)]
    return {"data": [trace for metric in metrics for trace in traces[metric]], "layout": layout}


def scatter_of(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    """A figure of each run's best value against a setting, with a menu of settings."""
    keys, choices = differing(runs), []
    known = [(run, name) for run, name in zip(runs, names, strict=True) if is_number(run.best)]
    for key in keys if len(known) > 1 else []:
        values = [value_of(run, key) for run, _ in known]
        is_numeric = all(map(is_number, values))
        scale = ("log" if spans_decades(values) else "linear") if is_numeric else "category"
        x = values if is_numeric else [escape(str(value)) for value in values]
        choices.append(_choice(key, {"x": [x]}, {"xaxis": _axis(key, type=scale)}))
    if not choices:
        return {"data": [], "layout": {}}
    first, layout = choices[0]["args"]
    trace = {"mode": "markers", "marker": {"size": 9}, "x": first["x"][0]}
    trace |= {"y": [run.best for run, _ in known], "text": [name for _, name in known]}
    layout = {**layout, "yaxis": _axis(f"best {known[0][0].objective}")}
    return {"data": [trace], "layout": layout | {"updatemenus": [_menu(choices, 0)]}}


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


def is_number(value: Any) -> bool:
    """Whether a value has a place on an axis."""
    return type(value) in (int, float) and math.isfinite(value)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether numbers are positive, the largest ten times the smallest or more."""
    return min(values) > 0 and max(values) >= 10 * min(values)


def _axis(title: str, **more: str) -> dict[str, Any]:
    return {"title": {"text": escape(title)}, **more}


def _choice(name: str, traces: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {"label": escape(name), "method": "update", "args": [traces, layout]}


def _menu(choices: list[dict[str, Any]], x: float) -> dict[str, Any]:
    return {"buttons": choices, "x": x, "xanchor": "left", "y": 1.15, "yanchor": "top"}
