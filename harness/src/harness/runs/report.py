"""Write runs as one HTML page that needs nothing else: for each objective a table and figures.

In: runs. Out: a page with plotly's figures. What a run says is escaped, in figures as well.
"""

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.files import write_durably
from harness.names import shown
from harness.runs.reading import RunFiles
from harness.runs.table import differing, text_of, titles

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

OURS = '<meta name="generator" content="harness report of runs">'
# The policy forbids the browser every request; plotly's script needs the two exceptions.
HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">{OURS}
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:">
<style>body > div {{ display: inline-block }}</style>
"""
FACTS = ("seconds", "samples/s", "tags", "notes", "commit", "reason")
MOST_POINTS = 500  # of a curve


def write_report(runs: Sequence[RunFiles], path: Path) -> None:
    """Write the page; an older report of that name is replaced, another file is refused."""
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise UserError("The report needs plotly: pip install -e .[report]") from error
    if path.exists() and OURS.encode() not in path.read_bytes()[:1000]:
        raise UserError(f"{path} is no report of runs. Remove it, or choose another -o FILE.")
    # A folder may be named by any bytes.
    write_durably(path, "".join(parts_of(runs)).encode(errors="replace"))


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
        tested = [name for run in group for name in run.results if name.startswith("test/")]
        columns = [*dict.fromkeys(["status", "best", *tested, *differing(group), *FACTS])]
        rows = [["run", *map(escape, titles(columns))]]
        for name, run in zip(names, group, strict=True):
            rows.append([name, *(escape(text_of(c, run.values.get(c))) for c in columns)])
        lines = map("</td><td>".join, rows)
        yield f"<h2>{escape(f'{objective} ({mode})' if objective else 'No objective')}</h2>"
        yield f"<table><tr><td>{'</td></tr><tr><td>'.join(lines)}</td></tr></table>"
        for figure in (*curves_of(group, names), *scatter_of(group, names)):
            figure.update_layout(height=400, width=640)
            yield to_html(figure, include_plotlyjs=script, full_html=False)
            script = False


def curves_of(runs: Sequence[RunFiles], names: Sequence[str]) -> "Iterator[Figure]":
    """Draw each metric that was logged more than once, the objective first."""
    from plotly.graph_objects import Figure

    metrics = dict.fromkeys(name for run in runs for name in run.table.columns[1:])
    for metric in sorted(metrics, key=lambda name: name != runs[0].objective[0]):
        figure = Figure(layout={"title": escape(metric), "showlegend": True})
        for run, name in zip(runs, names, strict=True):
            if metric in run.table.columns:
                points = run.table.select("step", metric).drop_nulls()
                points = points.gather_every(len(points) // MOST_POINTS + 1)
                figure.add_scatter(x=points["step"], y=points[metric], name=name)
        if len({step for curve in figure.data for step in curve.x}) > 1:
            yield figure


def scatter_of(runs: Sequence[RunFiles], names: Sequence[str]) -> "Iterator[Figure]":
    """Draw each run's best value against each setting that differs."""
    from plotly.graph_objects import Figure

    for name in differing(runs):
        x = [run.settings.get(name) for run in runs]
        are_rates = all(isinstance(value, float) and value > 0 for value in x)
        x = x if are_rates else [escape(text_of(name, value)) for value in x]
        figure = Figure(layout={"title": escape(f"best {runs[0].objective[0]} against {name}")})
        figure.add_scatter(x=x, y=[run.best for run in runs], text=names, mode="markers")
        if are_rates:
            figure.update_xaxes(type="log")
        yield figure
