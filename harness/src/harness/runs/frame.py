"""Put runs into one polars frame, and choose, sort and group its rows.

In: runs as ``reading`` has read them. Out: a ``Table`` with a row for each run and a column for
each fact, metric and setting. Next: ``tables`` prints it, ``report`` draws it.
"""

import difflib
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from harness.errors import UserError
from harness.names import flat
from harness.runs.reading import FACTS, RunFiles

REPEATS = ("seed", "data.seed", "data.fold")  # repetitions of one setting: `best` averages them
FIRST = ("model.optimizer", "model", "data", "trainer", "init", "seed")  # tuned most often
# Settings that say where a run is, and not what it computes.
PLACES = ("run_dir", "output_dir", "resume", "name", "tags", "notes", "objective", "mode")
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
CONDITION = re.compile(r"(.+?)(<=|>=|!=|<|>|=)(.*)")


@dataclass(frozen=True)
class Table:
    """Runs as rows of a frame, and which of its columns are metrics and which are settings."""

    frame: pl.DataFrame
    metrics: list[str]
    settings: list[str]


def table_of(runs: Sequence[RunFiles]) -> Table:
    """Make a table of runs; what a run does not have is null."""
    rows, metrics = [], dict.fromkeys(FACTS)
    settings: dict[str, None] = {}
    for run in runs:
        values = {k: v for k, v in flat(run.config).items() if k.partition(".")[0] not in PLACES}
        rows.append({**values, **run.metrics, **run.facts})
        metrics |= dict.fromkeys(run.metrics)
        settings |= dict.fromkeys(values)
    names = [*metrics, *(name for name in settings if name not in metrics)]
    frame = pl.DataFrame([_column(name, [row.get(name) for row in rows]) for name in names])
    return Table(frame, names[len(FACTS) : len(metrics)], names[len(metrics) :])


def _column(name: str, values: list[Any]) -> pl.Series:
    """Make a column of numbers or booleans; mixed values and lists become text, as typed."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        values = [None if value is None else float(value) for value in values]
    elif kinds not in ({int}, {float}, {bool}):
        values = [None if value is None else _as_text(value) for value in values]
    return pl.Series(name, values)


def _as_text(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def differing(table: Table) -> list[str]:
    """List settings that are not the same in all runs, those that are tuned most often first.

    Of two that are equal everywhere, such as ``seed`` and ``data.seed``, one is listed.
    """
    names: list[str] = []
    if not table.settings:
        return names
    has_config = pl.any_horizontal(pl.col(table.settings).is_not_null())
    frame = table.frame.filter(has_config)
    for name in sorted(table.settings, key=lambda name: (name.count("."), rank(name))):
        alike = [other for other in names if leaf(other) == leaf(name)]
        is_equal = any(frame[name].equals(frame[other]) for other in alike)
        if frame[name].n_unique() > 1 and not is_equal:
            names.append(name)
    return sorted(names, key=rank)


def rank(name: str) -> int:
    """Give the place of a setting among others."""
    places = (i for i, first in enumerate(FIRST) if f"{name}.".startswith(f"{first}."))
    return next(places, len(FIRST))


def leaf(name: str) -> str:
    """Return the last part of a key."""
    return name.rpartition(".")[2]


def column_named(table: Table, name: str) -> str:
    """Find the column of a fact, a metric or a setting, which may be called by its last part.

    Raises:
        UserError: with names that come near.
    """
    if name in table.frame.columns:
        return name
    if settings := [setting for setting in table.settings if leaf(setting) == name]:
        return min(settings, key=rank)
    names = {*table.frame.columns, *map(leaf, table.settings)}
    near = difflib.get_close_matches(name, sorted(names), 3, 0.3)
    raise UserError(f"No run has {name}. It may be {', '.join(near) or 'status'}.")


def chosen(table: Table, conditions: Sequence[str]) -> Table:
    """Keep runs that satisfy all conditions, such as ``status=finished`` or ``test/loss<0.1``.

    A list equals its text, and each of its items. Numbers are compared as numbers.

    Raises:
        UserError: if one is no condition, or no run has what it names.
    """
    frame = table.frame
    for condition in conditions:
        match = CONDITION.fullmatch(condition)
        if not match:
            raise UserError(f"{condition}: write a condition as status=finished or test/loss<0.1.")
        name, sign, wanted = (part.strip() for part in match.groups())
        column = frame[column_named(table, name)]
        try:
            numbers, number = column.cast(pl.Float64, strict=False), float(wanted)
        except ValueError:
            numbers, number = pl.repeat(None, len(frame), dtype=pl.Float64, eager=True), 0.0
        if sign in SIGNS:
            mask = SIGNS[sign](numbers, number)
        else:
            text = column.cast(pl.String).fill_null("null").str.to_lowercase().str.strip_chars("[]")
            word = re.sub(r",\s+", ",", wanted.lower().strip("[]"))
            mask = (text == word) | text.str.split(",").list.contains(word)
            mask = mask | (numbers == number).fill_null(value=False)
            mask = mask if sign == "=" else ~mask
        frame = frame.filter(mask.fill_null(value=False))
    return replace(table, frame=frame)


def in_order(table: Table, name: str, is_reversed: bool = False) -> Table:
    """Sort runs by a fact, a metric or a setting; those without it come last."""
    name, how = column_named(table, name), {"nulls_last": True, "maintain_order": True}
    return replace(table, frame=table.frame.sort(name, descending=is_reversed, **how))


def groups(table: Table, name: str, is_max: bool) -> pl.DataFrame:
    """Average runs that differ in their seed or fold alone; the best group comes first.

    Args:
        table: runs without a finite value are left out.
        name: a metric or fact. Where a run's objective is this metric, its best value counts.
        is_max: whether more is better.

    Returns:
        The mean, half the width of its 95 % confidence interval (Student's t), the number of runs,
        the settings that differ, and the folder of the best run.
    """
    from scipy.special import stdtrit  # scikit-learn requires SciPy

    score, runs = pl.col("score"), pl.col("runs")
    is_best = (pl.col("objective") == name) & pl.col("best").is_not_null()
    value = pl.when(is_best).then("best").otherwise(name).cast(pl.Float64, strict=False)
    frame = table.frame.with_columns(value.alias("score"), pl.lit(0).alias("all"))
    frame = frame.filter(score.is_finite())
    names = differing(replace(table, frame=frame))
    settings = [setting for setting in names if setting not in REPEATS]
    # A run that was repeated with the same seed and fold counts once, as it was run last.
    repeats = [setting for setting in REPEATS if setting in table.settings]
    frame = frame.sort("started").unique([*settings, *repeats] or ["run"], keep="last")
    means = frame.group_by(settings or ["all"]).agg(
        score.mean().alias("mean"),
        score.std(),
        pl.len().alias("runs"),
        pl.col("run").sort_by("score", descending=is_max).first().alias("best run"),
    )
    quantiles = pl.Series(stdtrit(means["runs"].to_numpy() - 1, 0.975))
    means = means.with_columns((quantiles * score / runs.sqrt()).alias("± 95 %"))
    means = means.sort("mean", "best run", descending=[is_max, False])
    return means.select(pl.col("mean").alias(name), "± 95 %", runs, *settings, "best run")
