"""Write runs as one HTML page without other files: a table and figures for each objective.

In: ``Runs``. Out: a page with plotly's figures. Texts from runs are escaped, in figures too.
"""

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from harness.display import display_path
from harness.errors import UserError
from harness.files import write_durably
from harness.runs.reading import FACTS, GPU, METRICS, Runs, read_table
from harness.runs.table import differing_settings, overview, titles

GENERATOR = '<meta name="generator" content="harness report of runs">'
# The policy forbids all requests by the browser. plotly's script needs the two "unsafe" entries.
HEAD = f"""<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
 script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:">
<style>
body {{ font-family: system-ui, sans-serif; margin: 1em 2em }}
h1 {{ font-size: 1.4em }} h2 {{ font-size: 1.1em }}
table {{ border-collapse: collapse; font-size: 0.9em }}
td {{ padding: 0.2em 0.8em; border-bottom: 1px solid #ddd }}
tr:first-child {{ font-weight: bold }}
body > div {{ display: inline-block }}
</style>
"""
MAX_POINTS = 500  # of a curve
MAX_CURVES = 100  # of a figure
MAX_NAMED = 30  # curves of a figure with a legend


def write_report(runs: Runs, path: Path) -> None:
    """Write the page. It replaces an older report at this path, but no other file.

    Raises:
        UserError: the path has another file, or plotly is not installed.
    """
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise UserError("The report needs plotly: pip install -e '.[report]'") from error
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:1000]:
        raise UserError(
            f"{path} exists, but is not a report of runs. Remove the file, or choose another with "
            "-o FILE."
        )
    write_durably(path, "".join(page_parts(runs)).encode())


def page_parts(runs: Runs) -> Iterator[str]:
    """Yield the page in pieces. Runs with the same objective are together, the best run first."""
    from plotly.io import templates, to_html

    style = {"height": 360, "width": 600, "template": templates["plotly"].to_plotly_json()}
    root = Path(os.path.commonpath([Path(run).resolve().parent for run in runs.frame["run"]]))
    title = escape(f"{len(runs.frame)} runs of {display_path(root)}")
    yield f"{HEAD}<title>{title}</title></head><body><h1>{title}</h1>"
    has_script = False  # the page needs plotly's script only once
    for (objective, mode), frame in runs.frame.group_by("objective", "mode", maintain_order=True):
        group = Runs(frame.sort("best", descending=mode == "max", nulls_last=True), runs.settings)
        names = [os.path.relpath(Path(run).resolve(), root) for run in group.frame["run"]]
        has_gpu = [name for name in GPU if group.frame[name].count()]
        facts = [name for name in FACTS if name not in GPU or name in has_gpu]
        rows = overview(group, facts).drop("objective", "mode").with_columns(run=pl.Series(names))
        rows = rows.select(column for column in rows if column.count())  # without empty columns
        if "started" in rows.columns:
            rows = rows.with_columns(pl.from_epoch("started").dt.strftime("%Y-%m-%d %H:%M UTC"))
        head = titles(rows.columns).values()
        lines = ("</td><td>".join(escape(text_of(x)) for x in row) for row in (head, *rows.rows()))
        yield f"<h2>{escape(f'{objective} ({mode})' if objective else 'No objective')}</h2>"
        yield f"<table><tr><td>{'</td></tr><tr><td>'.join(lines)}</td></tr></table>"
        names = [*map(escape, names)]
        for figure in (*curves_of(group, names), *scatter_of(group, names)):
            figure["layout"] |= style
            # plotly would validate for 2 ms per curve.
            yield to_html(figure, include_plotlyjs=not has_script, full_html=False, validate=False)
            has_script = True


def text_of(value: object) -> str:
    """Return a value as text for a person."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def _table_of(run: Path) -> pl.DataFrame:
    """Return a run's table of metrics; a damaged one counts as empty."""
    try:
        return read_table(run / METRICS)
    except UserError:
        return pl.DataFrame(schema={"step": pl.Int64})


def curves_of(runs: Runs, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a figure for each metric that was logged more than once, the objective first.

    It has curves of the best runs only: the eye cannot separate more.
    """
    objective = runs.frame["objective"][0]
    tables = [_table_of(Path(run)) for run in runs.frame["run"][:MAX_CURVES]]
    metrics = dict.fromkeys(name for table in tables for name in table.columns[1:])
    which = "the best " if objective else ""
    some = f" ({which}{MAX_CURVES} of {len(names):,} runs)" if len(names) > MAX_CURVES else ""
    for metric in sorted(metrics, key=lambda name: name != objective):
        curves = []
        for table, name in zip(tables, names, strict=False):
            if metric in table.columns:
                points = table.select("step", metric).drop_nulls()
                points = points.gather_every(len(points) // MAX_POINTS + 1)
                x, y = points["step"].to_list(), points[metric].to_list()
                curves.append({"type": "scatter", "x": x, "y": y, "name": name})
        if len({step for curve in curves for step in curve["x"]}) > 1:
            layout = {"title": {"text": f"{escape(metric)}{some}"}}
            yield {"data": curves, "layout": layout | {"showlegend": len(curves) <= MAX_NAMED}}


def scatter_of(runs: Runs, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a figure for each setting that differs: the best value of each run against it."""
    y = runs.frame["best"].to_list()
    for name in differing_settings(runs):
        x = runs.frame[name].to_list()
        are_rates = all(isinstance(value, float) and value > 0 for value in x)
        x = x if are_rates else [escape(text_of(value)) for value in x]
        points = {"type": "scatter", "x": x, "y": y, "text": names, "mode": "markers"}
        title = escape(f"best {runs.frame['objective'][0]} against {name}")
        axis = {"type": "log"} if are_rates else {}
        yield {"data": [points], "layout": {"title": {"text": title}, "xaxis": axis}}
