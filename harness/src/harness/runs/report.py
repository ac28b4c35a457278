"""Write runs as one HTML page that needs nothing else: for each objective a table and figures.

In: runs. Out: a page with plotly's figures. What a run says is escaped, in figures as well.
"""

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from harness.errors import UserError
from harness.files import write_durably
from harness.names import shown
from harness.runs.frame import differing, table_of
from harness.runs.reading import RunFiles
from harness.runs.tables import text, titles

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

OURS = '<meta name="generator" content="harness report of runs">'
# The policy forbids the browser every request; plotly's script needs the two exceptions.
HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">{OURS}
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:">
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1rem 2rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
th, td {{ padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd }}
body > div {{ display: inline-block }}
</style>
"""
FACTS = ("seconds", "samples/s", "started", "tags", "notes", "commit", "reason")
MOST_POINTS = 500  # of a curve


def write_report(runs: Sequence[RunFiles], path: Path) -> None:
    """Write the page; an older report of that name is replaced.

    Raises:
        UserError: plotly is not installed, or the path is another file, or cannot be written.
    """
    try:
        import plotly.io  # noqa: F401
    except ImportError as error:
        raise UserError("The report needs plotly: pip install -e .[report]") from error
    try:
        if path.exists() and OURS.encode() not in path.read_bytes()[:1000]:
            raise UserError(f"{path} is no report of runs. Remove it, or choose another -o FILE.")
        # A folder may be named by any bytes.
        write_durably(path, "".join(parts_of(runs)).encode(errors="replace"))
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
        names = [escape(os.path.relpath(run.folder.resolve(), root)) for run in group]
        yield f"<h2>{escape(f'{objective} ({mode})' if objective else 'No objective')}</h2>"
        yield html_table(group, names)
        for figure in (*curves_of(group, names), *scatter_of(group, names)):
            figure.update_layout(height=400, width=640)
            yield to_html(figure, include_plotlyjs=script, full_html=False)
            script = False
    yield "</body></html>"


def html_table(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Write one row for each run: status, results, the settings that differ, facts."""
    table = table_of(runs)
    tested = [name for name in table.metrics if name.startswith("test/")]
    columns = ["status", "best", *tested, *differing(table), *FACTS]
    columns = [name for name in columns if table.frame[name].null_count() < len(runs)]
    rows = [("run", *map(escape, titles(columns)))]
    for name, row in zip(names, table.frame.select(columns).iter_rows(), strict=True):
        rows.append((name, *map(escape, map(text, columns, row))))
    lines = "</td></tr>\n<tr><td>".join("</td><td>".join(row) for row in rows)
    return f"<table><tr><td>{lines}</td></tr></table>"


def curves_of(runs: Sequence[RunFiles], names: Sequence[str]) -> "Iterator[Figure]":
    """Draw each metric that was logged more than once, the objective first."""
    import plotly.express as px

    metrics = dict.fromkeys(name for run in runs for name in run.table.columns[1:])
    for metric in sorted(metrics, key=lambda name: name != runs[0].objective[0]):
        curves = []
        for run, name in zip(runs, names, strict=True):
            if metric in run.table.columns:
                points = run.table.select("step", pl.col(metric).alias("y")).drop_nulls()
                points = points.gather_every(len(points) // MOST_POINTS + 1)
                curves.append(points.with_columns(pl.lit(name).alias("run")))
        points = pl.concat(curves)
        if points["step"].n_unique() > 1:
            figure = px.line(points, x="step", y="y", color="run", title=escape(metric))
            yield figure.update_layout(yaxis_title=None)


def scatter_of(runs: Sequence[RunFiles], names: Sequence[str]) -> "Iterator[Figure]":
    """Draw each run's best value against each setting that differs."""
    import plotly.express as px

    table = table_of(runs)
    frame = table.frame.with_columns(pl.Series("label", names), pl.col("best").cast(pl.Float64))
    frame = frame.filter(pl.col("best").is_finite())
    for name in differing(table) if len(frame) > 1 else []:
        x = frame[name].alias("x")
        numbers: list[float] = x.drop_nulls().to_list() if x.dtype.is_numeric() else []
        is_log = bool(numbers) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
        if not numbers:
            x = pl.Series("x", [escape(str(value)) for value in x])
        title = escape(f"best {runs[0].objective[0]} against {name}")
        points = frame.select(x, "best", "label")
        figure = px.scatter(points, x="x", y="best", hover_name="label", log_x=is_log, title=title)
        yield figure.update_layout(xaxis_title=None)
