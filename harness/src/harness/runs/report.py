"""Write runs as one HTML page that needs nothing else: for each objective a table and figures.

In: runs. Out: a page with plotly's figures. What a run says is escaped, in figures as well.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from harness.errors import UserError
from harness.files import replacing
from harness.places import shown
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
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse }}
th, td {{ padding: .25rem .6rem; text-align: left; border-bottom: 1px solid #ddd }}
body > div {{ display: inline-block; max-width: 100% }}
td {{ max-width: 24rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }}
</style>
"""
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
        for figure in (*curves_of(group, names), *scatter_of(group, names)):
            figure.update_layout(height=400, width=640, showlegend=len(group) <= MOST_IN_LEGEND)
            yield to_html(figure, BUTTONS, include_plotlyjs=script, full_html=False)
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


def curves_of(runs: Sequence[RunFiles], names: Sequence[str]) -> "Iterator[Figure]":
    """Draw each metric that was logged more than once: the objective first."""
    import plotly.express as px

    counts = Counter(name for run in runs for name in run.table.columns[1:])
    labels = _labels(names)
    for metric in sorted(counts, key=lambda name: (name != runs[0].objective[0], -counts[name])):
        frames = []
        for run, label in zip(runs, labels, strict=True):
            if metric in run.table.columns:
                points = thinned(run.table.select("step", pl.col(metric).alias("y")).drop_nulls())
                frames.append(points.with_columns(pl.lit(label).alias("run")))
        points = pl.concat(frames)
        if points["step"].n_unique() > 1:
            yield px.line(points, x="step", y="y", color="run", markers=True, title=escape(metric))


def scatter_of(runs: Sequence[RunFiles], names: Sequence[str]) -> "Iterator[Figure]":
    """Draw each run's best value against each setting that differs."""
    import plotly.express as px

    table = table_of(runs)
    labels = pl.Series("label", _labels(names), dtype=pl.String)
    frame = table.frame.with_columns(labels, pl.col("best").cast(pl.Float64))
    frame = frame.filter(pl.col("best").is_finite())
    for name in differing(table) if len(frame) > 1 else []:
        x = frame[name].alias("x")
        numbers: list[float] = x.drop_nulls().to_list() if x.dtype.is_numeric() else []
        is_log = bool(numbers) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)
        if not numbers:
            x = pl.Series("x", _labels(x.cast(pl.String).fill_null("null").to_list()))
        title = escape(f"best {runs[0].objective[0]} against {name}")
        points = frame.select(x, "best", "label")
        yield px.scatter(points, x="x", y="best", hover_name="label", log_x=is_log, title=title)


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


def _labels(names: Sequence[str]) -> list[str]:
    """Shorten texts for a figure, unless two would become the same, and escape them."""
    short = [name[-MOST_CHARACTERS:] for name in names]
    short = [s if s == n else f"…{s}" for s, n in zip(short, names, strict=True)]
    return [*map(escape, short if len({*short}) == len({*names}) else names)]
