"""Filter, group and compare runs, and print tables of them.

In: ``Runs``. Out: rows, and lines on the screen. ``report`` draws them.
"""

import operator
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from harness import provenance
from harness.display import join_first
from harness.errors import UserError, print_text, printable
from harness.keys import last_part
from harness.objective import mode_of
from harness.runs.reading import GPU, Runs
from harness.suggestions import suggest

REPEATS = ("seed", "data.seed", "data.fold")  # settings over which `best` averages
SIGNS: dict[str, Callable[[Any, Any], pl.Expr]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
CONDITION = re.compile(r"(.+?)(<=|>=|!=|<|>|=)(.*)")
SCREEN = (120, 24)  # columns and lines if the output is no terminal
FOLDERS = ("run", "best run")
LISTED = (*GPU, "reason")  # facts that `ls` prints
MAX_UNCUT = 3  # columns of a table that is never cut: name and value, or name and two runs


def differing_settings(runs: Runs) -> list[str]:
    """Return the settings that are not the same in all runs.

    Settings that every run has come first, and among these the ones with the fewest dots. Settings
    with the same last word and equal values, such as ``lr`` and ``max_lr``, count as one.
    """
    table = runs.frame.select(runs.settings)
    # Skip runs without a readable config: all their settings are null.
    columns = [*table.filter(~pl.all_horizontal(pl.all().is_null()))]
    columns.sort(key=lambda x: (x.null_count() > 0, x.name.count("."), len(last_part(x.name))))
    names: dict[tuple[Any, ...], str] = {}
    for column in columns:
        if column.n_unique() > 1:
            word = last_part(column.name).rpartition("_")[2]
            names.setdefault((word, *column), column.name)
    return [*names.values()]


def full_name(frame: pl.DataFrame, name: str) -> str:
    """Return the column of a fact, a metric or a setting, which may be named by its last part.

    Raises:
        UserError: there is no such column.
    """
    if name in frame.columns:
        return name
    if inner := [column for column in frame.columns if column.endswith(f".{name}")]:
        return min(inner, key=lambda column: column.count("."))
    raise UserError(f"No run has {name}.{suggest(name, frame.columns)}")


def filter_runs(runs: Runs, conditions: Sequence[str]) -> Runs:
    """Return the runs that satisfy all conditions, such as ``status=finished``.

    Raises:
        UserError: a condition cannot be read, or no run satisfies all of them.
    """
    frame = runs.frame
    for condition in conditions:
        if not (match := CONDITION.fullmatch(condition)):
            raise UserError(
                f"--filter {condition}: write a condition such as status=finished or test/loss<0.1."
            )
        name, sign, wanted = match.groups()
        column = pl.col(full_name(frame, name))
        wanted_text = wanted.lower().strip("[]").replace(" ", "")
        number, limit = (x.cast(pl.Float64, strict=False) for x in (column, pl.lit(wanted)))
        number = number.fill_nan(None)
        if sign in SIGNS:
            frame = frame.filter(SIGNS[sign](number, limit))
            continue
        # A list equals its text, and each of its items.
        text = column.cast(pl.String).str.to_lowercase().str.strip_chars("[]").fill_null("null")
        is_equal = (text == wanted_text) | text.str.split(",").list.contains(wanted_text)
        is_equal |= (number == limit).fill_null(value=False)
        frame = frame.filter(is_equal == (sign == "="))
    if frame.is_empty():
        raise UserError(f"None of {len(runs.frame)} runs satisfies all --filter conditions.")
    return runs._replace(frame=frame)


def overview(
    runs: Runs, facts: Sequence[str] = LISTED, first: Collection[str] = ()
) -> pl.DataFrame:
    """Return for each run its status, its best value, settings that differ and test metrics.

    A narrow screen shows only the first columns: the settings in ``first``, then the test metric
    with the objective's name, then other settings.
    """
    objectives = set(runs.frame["objective"].drop_nulls())
    fitting = {f"test/{objective.rpartition('/')[2]}" for objective in objectives}
    tested = [name for name in runs.frame.columns if name.startswith("test/")]
    tested.sort(key=lambda name: name not in fitting)
    num_first = len(fitting & {*tested})
    # Leave out a strategy's own settings, which only `diff` lists: the experiment is the same.
    settings = [
        name for name in differing_settings(runs) if not name.startswith("trainer.strategy.")
    ]
    settings.sort(key=lambda name: name not in first)
    num_swept = len({*settings} & {*first})
    begin = ["run", "status", "best", "objective", *settings[:num_swept], *tested[:num_first]]
    return runs.frame.select(*begin, *settings[num_swept:], *tested[num_first:], *facts)


def best(runs: Runs, by: str | None, is_reversed: bool) -> tuple[list[dict[str, Any]], str]:
    """Average a metric over runs that differ only in seed or fold.

    If the metric is the objective of all runs, the average uses the best value of each run,
    otherwise the final value.

    Args:
        runs: the runs.
        by: the metric; ``None`` is the runs' objective.
        is_reversed: whether the worst group comes first.

    Returns:
        A row per group: the mean, half the width of its 95 % confidence interval (Student's t),
        the number of runs, the best run's folder, and the settings that differ. Also a line
        that describes the order of the groups.
    """
    from scipy.special import stdtrit  # scikit-learn requires SciPy

    modes: dict[str, str] = dict(runs.frame.select("objective", "mode").drop_nulls().rows())
    if not by and len(modes) != 1:
        raise UserError(
            f"The runs have {len(modes)} objectives: {', '.join(sorted(modes))}.\n"
            "Add --by METRIC to choose a metric."
        )
    name = by or next(iter(modes))
    is_objective = [*modes] == [name]  # of all runs
    name = name if is_objective else full_name(runs.frame, name)
    is_max = (modes.get(name, mode_of(name)) == "min") == is_reversed
    value = pl.col("best" if is_objective else name).cast(pl.Float64, strict=False)
    frame = runs.frame.with_columns(value=value).filter(pl.col("value").is_finite())
    if frame.is_empty():
        raise UserError(f"None of {len(runs.frame)} runs has a finite value of {name}.")
    settings = differing_settings(runs._replace(frame=frame))
    keys = ["objective"] * (len(modes) > 1)
    keys += [key for key in settings if key not in (*REPEATS, name)]
    # Runs with equal seed and fold are copies of one run, so each gets a row of its own.
    repeats = [key for key in REPEATS if key in frame.columns]
    frame = frame.with_columns(copy=pl.int_range(pl.len()).over(*keys, *repeats))
    grouped = frame.sort("value", descending=is_max).group_by(*keys, "copy", maintain_order=True)
    rows = grouped.agg(
        pl.col("value").mean().alias(name),
        (pl.col("value").std() / pl.len().sqrt()).alias("± 95 %"),
        pl.len().alias("runs"),
        pl.col("run").first().alias("best run"),
    ).sort(name, descending=is_max)
    half_width = rows["± 95 %"] * pl.Series(stdtrit(rows["runs"] - 1, 0.975), dtype=pl.Float64)
    rows = rows.with_columns(half_width).select(name, "± 95 %", "runs", "best run", *keys)
    left_out = len(runs.frame) - len(frame)
    return (
        rows.to_dicts(),
        f"{name}: the {'best' if is_objective else 'final'} value of each run, the "
        f"{'largest' if is_max else 'smallest'} first (--reverse reverses that)."
        + f"\nRuns without a finite value: {left_out}."
        * bool(left_out),
    )


def difference(runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each setting, metric and fact in which two runs differ."""
    names = runs.frame.columns
    metrics = [n for n in names[names.index("best") + 1 :] if n not in runs.settings]
    facts = ("status", "seconds", "samples/s", *GPU, "commit")
    names = ["run", *runs.settings, *metrics, *facts]
    first, second = runs.frame.to_dicts()
    return [{"name": n, "one": first[n], "two": second[n]} for n in names if first[n] != second[n]]


def details(runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each fact that is known of a run, including its command and code."""
    (facts,) = runs.frame.to_dicts()
    recorded = provenance.read(Path(facts["run"]))
    starts = recorded.get("starts") or [{}]
    facts |= recorded | starts[-1] | {"starts": len(starts)}
    if isinstance(started := facts["started"], int | float):
        facts["started"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
    return [{"name": n, "value": str(v)} for n, v in facts.items() if v not in (None, "", {}, [])]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows: the first columns that fit on the screen, then the names of some others.

    Empty columns are omitted. The run's folder comes last. The reason of a failure has a line of
    its own. If all rows have the same objective, one line below the table names it.
    """
    present = {name for row in rows for name, value in row.items() if value is not None}
    present.discard("reason")
    objectives = {row["objective"] for row in rows if row.get("objective")}
    if len(objectives) == 1:
        present.remove("objective")
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name in present]
    names.sort(key=FOLDERS.__contains__)
    title = titles(names)
    columns = {name: [title[name], *(cell(row.get(name)) for row in rows)] for name in names}
    folder_widths = [len(text) + 2 for name in FOLDERS for text in columns.get(name, [])]
    screen_width, printed = shutil.get_terminal_size(SCREEN).columns, list[list[str]]()
    width_left = max(screen_width - max(folder_widths, default=0), screen_width // 2)
    for name, texts in columns.items():
        width = max(map(len, texts))
        if width <= width_left or name in FOLDERS or len(columns) <= MAX_UNCUT:
            printed.append([text.ljust(width) for text in texts])
            width_left -= width + 2
            names.remove(name)
    lines = ["  ".join(line).rstrip() for line in zip(*printed, strict=True)]
    for number, row in reversed([*enumerate(rows, start=1)]):
        if reason := row.get("reason"):
            lines.insert(number + 1, f"    {cell(reason)}")
    if "best" in present and "objective" not in present:
        lines += [f"best: the best {cell(name)} of each run." for name in objectives]
    if names:
        omitted = join_first(title[name] for name in names)
        lines.append(f"Columns that do not fit: {omitted}. --json prints all.")
    print_text("\n".join(lines))


def cell(value: Any) -> str:
    """Return a value as text for a table: numbers with five digits, "" for ``None``."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else printable(str(value))


def titles(names: Sequence[str]) -> dict[str, str]:
    """Shorten each key to its last part, unless another key has the same last part."""
    counts = Counter(map(last_part, names))
    return {name: last_part(name) if counts[last_part(name)] == 1 else name for name in names}
