"""Put runs into one polars frame, and choose and group its rows.

In: runs as ``reading`` has read them. Out: a ``Table`` with a row for each run and a column for
each fact, metric and setting. Next: ``tables`` prints it, ``report`` draws it.
"""

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from harness.errors import UserError
from harness.names import did_you_mean, flat
from harness.runs.reading import RunFiles

REPEATS = ("seed", "data.seed", "data.fold")  # repetitions of one setting: `best` averages them
# Settings that say where a run is, and not what it computes.
PLACES = ("run_dir", "output_dir", "resume", "name", "tags", "notes", "objective", "mode")
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
CONDITION = re.compile(r"(.+?)(<=|>=|!=|<|>|=)(.*)")


@dataclass(frozen=True)
class Table:
    """Runs as rows of a frame, and which columns are facts, metrics and settings."""

    frame: pl.DataFrame
    facts: list[str]
    metrics: list[str]
    settings: list[str]


def table_of(runs: Sequence[RunFiles]) -> Table:
    """Make a table of runs; what a run does not have is null."""
    settings = [
        {k: v for k, v in flat(run.config).items() if k.partition(".")[0] not in PLACES}
        for run in runs
    ]
    kinds = [run.facts for run in runs], [run.results for run in runs], settings
    facts, metrics, keys = ([*dict.fromkeys(n for row in rows for n in row)] for rows in kinds)
    names = dict.fromkeys([*facts, *metrics, *keys])
    rows = [{**c, **b, **a} for a, b, c in zip(*kinds, strict=True)]
    frame = pl.DataFrame([_column(name, [row.get(name) for row in rows]) for name in names])
    return Table(frame, facts, metrics, keys)


def _column(name: str, values: list[Any]) -> pl.Series:
    """Make a column of numbers or booleans; mixed values and lists become text, as typed."""
    kinds = {type(value) for value in values if value is not None}
    if kinds not in ({int}, {float}, {int, float}, {bool}):
        values = [f"[{','.join(map(str, v))}]" if isinstance(v, list) else v for v in values]
        values = [None if value is None else str(value) for value in values]
    return pl.Series(name, values, strict=False)


def differing(table: Table) -> list[str]:
    """List settings that are not the same in all runs, the outermost first.

    Of two that are equal everywhere, such as ``seed`` and ``data.seed``, one is listed.
    """
    if not table.settings:
        return []
    # A run whose settings are missing differs in none.
    frame = table.frame.filter(pl.any_horizontal(pl.col(table.settings).is_not_null()))
    names: dict[tuple[Any, ...], str] = {}
    for name in sorted(table.settings, key=depth):
        if frame[name].n_unique() > 1:
            names.setdefault((leaf(name), *frame[name]), name)
    return [*names.values()]


def depth(name: str) -> int:
    """Return how deep a setting lies."""
    return name.count(".")


def leaf(name: str) -> str:
    """Return the last part of a key."""
    return name.rpartition(".")[2]


def column_named(table: Table, name: str) -> str:
    """Find the column of a fact, a metric or a setting, which may be called by its last part."""
    if name in table.frame.columns:
        return name
    if settings := [one for one in table.settings if one.endswith(f".{name}")]:
        return min(settings, key=depth)
    raise UserError(f"No run has {name}.{did_you_mean(name, table.frame.columns)}")


def chosen(table: Table, conditions: Sequence[str]) -> Table:
    """Keep runs that satisfy all conditions, such as ``status=finished`` or ``test/loss<0.1``."""
    frame = table.frame
    for condition in conditions:
        match = CONDITION.fullmatch(condition)
        if not match:
            raise UserError(f"{condition}: write a condition as status=finished or test/loss<0.1.")
        name, sign, wanted = match.groups()
        values = frame[column_named(table, name)]
        frame = frame.filter([_satisfies(value, sign, wanted.lower()) for value in values])
    return replace(table, frame=frame)


def _satisfies(value: Any, sign: str, wanted: str) -> bool:
    """Compare numbers as numbers; a list equals its text, and each of its items."""
    try:
        number, other = float(value), float(wanted)
    except (TypeError, ValueError):
        number = other = math.nan
    if sign in SIGNS:
        return bool(SIGNS[sign](number, other))
    text = "null" if value is None else str(value).lower().strip("[]")
    wanted = wanted.strip("[]").replace(" ", "")
    return (number == other or wanted in (text, *text.split(","))) == (sign == "=")


def groups(table: Table, name: str, is_max: bool) -> pl.DataFrame:
    """Average a metric over runs that differ in seed or fold alone; the best group comes first.

    Where the objective of a run is this metric, its best value counts. A row has the mean, half the
    width of its 95 % confidence interval (Student's t), the number of runs, the settings that
    differ, and the folder of the best run.
    """
    from scipy.special import stdtrit  # scikit-learn requires SciPy

    score, runs = pl.col("score"), pl.col("runs")
    is_best = (pl.col("objective") == name) & pl.col("best").is_not_null()
    value = pl.when(is_best).then("best").otherwise(name).cast(pl.Float64, strict=False)
    frame = table.frame.with_columns(value.alias("score")).filter(score.is_finite())
    names = differing(replace(table, frame=frame))
    settings = [setting for setting in names if setting not in REPEATS]
    # Runs that are equal but for their folder are no repetitions: each is in a row of its own.
    keys = [*settings, *(setting for setting in REPEATS if setting in table.settings)]
    copy = pl.int_range(pl.len()).over(keys) if keys else pl.int_range(pl.len())
    means = frame.group_by([*settings, copy.alias("copy")]).agg(
        score.mean().alias("mean"),
        score.std(),
        pl.len().alias("runs"),
        pl.col("run").sort_by("score", descending=is_max).first().alias("best run"),
    )
    quantiles = pl.Series(stdtrit(means["runs"].to_numpy() - 1, 0.975))
    means = means.with_columns((quantiles * score / runs.sqrt()).alias("± 95 %"))
    means = means.sort("mean", "best run", descending=[is_max, False])
    return means.select(pl.col("mean").alias(name), "± 95 %", runs, *settings, "best run")
