"""Write runs as one HTML page that needs nothing else: for each objective a table and two figures.

In: runs. Out: a page with plotly's figures. What a run says is escaped, in figures as well.
"""

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from harness.errors import UserError
from harness.files import replacing
from harness.places import shown
from harness.runs.frame import differing, table_of
from harness.runs.reading import RunFiles
from harness.runs.tables import text, titles

OURS = '<meta name="generator" content="harness report of runs">'
# The policy forbids the browser every request; plotly's script needs the two exceptions.
HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">{OURS}
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:">
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1rem 2rem }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th, td {{ padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd }}
td {{ max-width: 24rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }}
</style>
"""
COLOURS = ("#2f6fde", "#e07b00", "#1f9d55", "#d43d51", "#8a5cd6", "#9c6b4e", "#d65db1", "#7a828e")
FACTS = ("seconds", "samples/s", "held back by", "started", "tags", "notes", "commit", "reason")
# By name, because plotly's own choice has a button that sends the chart away.
BUTTONS = {"displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d", "autoScale2d"]]}
NUM_BUCKETS = 250  # of a long curve; each keeps its smallest and its largest value
MOST_IN_LEGEND = 25
MOST_CHARACTERS = 40  # of a label in a figure: long ones overlap


def write_report(runs: Sequence[RunFiles], path: Path, is_forced: bool = False) -> None:
    """Write the page; an older report of that name is replaced, another file if ``is_forced``.

    Raises:
        UserError: plotly is not installed, or the path is taken, or cannot be written.
    """
    try:
        import plotly.io  # noqa: F401
    except ImportError as error:
        raise UserError(
            "The report is drawn with plotly, which is not installed: pip install -e .[report]"
        ) from error
    try:
        if path.exists() and not is_forced and OURS.encode() not in path.read_bytes()[:1000]:
            raise UserError(f"{path} is no report of runs, and is kept. --force replaces it.")
        with replacing(path) as file:
            for part in parts_of(runs):
                file.write(part.encode(errors="replace"))  # a folder may be named by any bytes
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def parts_of(runs: Sequence[RunFiles]) -> Iterator[str]:
    """Write the page in pieces: runs that seek the same objective stand together, best first."""
    from plotly.io import to_html

    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    title = escape(f"{len(runs)} runs of {shown(root)}")
    yield f"{HEAD}<title>{title}</title></head><body><h1>{title}</h1>"
    script = True  # plotly's, once
    for objective, mode in dict.fromkeys(run.objective for run in runs):
        group = [run for run in runs if run.objective == (objective, mode)]
        group.sort(key=lambda run: run.best or 0.0, reverse=mode == "max")
        group.sort(key=lambda run: run.best is None)  # a stable sort: these come last
        names = [os.path.relpath(run.folder.resolve(), root) for run in group]
        yield f"<h2>{escape(f'{objective} ({mode})' if objective else 'No objective')}</h2>"
        yield html_table(group, names)
        for figure in (curves_of(group, names), scatter_of(group, names)):
            if figure["data"]:
                figure["layout"] |= {"height": 480, "hovermode": "closest"}
                yield to_html(figure, BUTTONS, False, script, False, validate=False)
                script = False
    yield "</body></html>"


def html_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Write one row for each run: status, results, the settings that differ, facts."""
    table = table_of(runs)
    tested = [name for name in table.metrics if name.startswith("test/")]
    columns = ["status", "best", *tested, *differing(table), *FACTS]
    columns = [name for name in columns if table.frame[name].null_count() < len(runs)]
    rows = [_row("th", ["run", *titles(columns)])]
    for name, row in zip(names, table.frame.select(columns).iter_rows(), strict=True):
        rows.append(_row("td", [name, *map(text, columns, row)]))
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def curves_of(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    """Draw each metric that was logged more than once, with a menu of metrics.

    The objective comes first, then what most of the runs have logged.
    """
    traces: dict[str, list[dict[str, Any]]] = {}
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        for metric in run.table.columns[1:]:
            points = thinned(run.table.select("step", metric).drop_nulls())
            if len(points) > 1:
                trace: dict[str, Any] = {
                    "x": points["step"].to_list(),
                    "y": points[metric].to_list(),
                }
                trace |= {"name": _label(name), "line": {"color": COLOURS[i % len(COLOURS)]}}
                traces.setdefault(metric, []).append(trace | {"mode": "lines+markers"})
    metrics = sorted(traces, key=lambda name: (name != runs[0].objective[0], -len(traces[name])))
    choices = []
    for metric in metrics:
        visible = [metric == other for other in metrics for _ in traces[other]]
        choices.append(_choice(metric, {"visible": visible}, {"yaxis.title.text": _label(metric)}))
    for other in metrics[1:]:
        for trace in traces[other]:
            trace["visible"] = False
    scales = [_choice(scale, {}, {"yaxis.type": scale}) for scale in ("linear", "log")]
    layout: dict[str, Any] = {"showlegend": 1 < len(runs) <= MOST_IN_LEGEND}
    layout |= {"xaxis": _axis("step"), "yaxis": _axis(*metrics[:1] or [""])}
    layout["updatemenus"] = [_menu(choices, 0), _menu(scales, 0.5)]
    return {"data": [trace for metric in metrics for trace in traces[metric]], "layout": layout}


def scatter_of(runs: Sequence[RunFiles], names: Sequence[str]) -> dict[str, Any]:
    """Draw each run's best value against a setting, with a menu of settings."""
    table = table_of(runs)
    is_known = table.frame["best"].cast(pl.Float64).is_finite().fill_null(value=False)
    frame, choices = table.frame.filter(is_known), []
    for key in differing(table):
        values, scale = frame[key].to_list(), "category"
        if frame[key].dtype.is_numeric() and values and None not in values:
            scale = "log" if min(values) > 0 and max(values) >= 10 * min(values) else "linear"
        else:
            values = [_label(str(value)) for value in values]
        choices.append(_choice(key, {"x": [values]}, {"xaxis": _axis(key, type=scale)}))
    if not choices or len(frame) < 2:
        return {"data": [], "layout": {}}
    first, layout = choices[0]["args"]
    trace = {"mode": "markers", "marker": {"size": 9}, "x": first["x"][0]}
    labels = [_label(name) for name, known in zip(names, is_known, strict=True) if known]
    trace |= {"y": frame["best"].to_list(), "text": labels}
    layout = {**layout, "yaxis": _axis(f"best {runs[0].objective[0]}")}
    return {"data": [trace], "layout": layout | {"updatemenus": [_menu(choices, 0)]}}


def thinned(points: pl.DataFrame) -> pl.DataFrame:
    """Keep of each bucket of a long curve the points of its smallest and its largest value."""
    size = -(-len(points) // NUM_BUCKETS)
    if size <= 2:
        return points
    value = pl.col(points.columns[1])
    points = points.with_columns((pl.int_range(pl.len()) // size).alias("bucket"))
    points = points.filter(value.is_finite())
    points = points.unique(["bucket", points.columns[1]], keep="first", maintain_order=True)
    is_extreme = (value == value.min().over("bucket")) | (value == value.max().over("bucket"))
    return points.filter(is_extreme).drop("bucket")


def _label(name: str) -> str:
    """Shorten a text for a figure, and escape it."""
    return escape(name if len(name) <= MOST_CHARACTERS else f"…{name[-MOST_CHARACTERS:]}")


def _axis(title: str, **more: str) -> dict[str, Any]:
    return {"title": {"text": _label(title)}, "automargin": True, **more}


def _choice(name: str, traces: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return {"label": _label(name), "method": "update", "args": [traces, layout]}


def _menu(choices: list[dict[str, Any]], x: float) -> dict[str, Any]:
    return {"buttons": choices, "x": x, "xanchor": "left", "y": 1.15, "yanchor": "top"}
