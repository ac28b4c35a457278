"""Choose, group and compare runs, and print them as tables of polars.

In: runs as a frame. Out: rows, and lines on the screen. ``report`` draws them.
"""

import operator
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from harness import record
from harness.errors import UserError, print_text, printable
from harness.names import did_you_mean, direction, leaf
from harness.runs.reading import GPU, Runs

REPEATS = ("seed", "data.seed", "data.fold")  # repetitions of one setting: `best` averages them
SIGNS: dict[str, Callable[[Any, Any], pl.Expr]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
CONDITION = re.compile(r"(.+?)(<=|>=|!=|<|>|=)(.*)")
SCREEN = (120, 24)  # columns and lines where there is no terminal
FOLDERS = ("run", "best run")
LAST = (*FOLDERS, "reason")  # which are shown whole, whatever room there is
SHOWN = (*GPU, "reason")  # facts of a list of runs
MOST_WHOLE = 3  # columns of a table that is shown whole: name and value, or those of two runs


def differing(runs: Runs) -> list[str]:
    """List settings that are not the same in all runs, the outermost first.

    Of two that are equal everywhere, such as ``seed`` and ``data.seed``, one is listed.
    """
    outermost_first: list[str] = sorted(runs.settings, key=lambda name: name.count("."))
    table = runs.frame.select(outermost_first)
    names: dict[tuple[Any, ...], str] = {}
    # A run whose config is missing or damaged differs in none.
    for column in table.filter(~pl.all_horizontal(pl.all().is_null())):
        if column.n_unique() > 1:
            names.setdefault((leaf(column.name), *column), column.name)
    return [*names.values()]


def full_name(frame: pl.DataFrame, name: str) -> str:
    """Find a fact, a metric or a setting, which may be called by its last part."""
    if name in frame.columns:
        return name
    if inner := [one for one in frame.columns if one.endswith(f".{name}")]:
        return min(inner, key=lambda name: name.count("."))
    raise UserError(f"No run has {name}.{did_you_mean(name, frame.columns)}")


def chosen(runs: Runs, conditions: Sequence[str]) -> Runs:
    """Keep runs that satisfy all conditions, such as ``status=finished`` or ``test/loss<0.1``."""
    frame = runs.frame
    for condition in conditions:
        if not (match := CONDITION.fullmatch(condition)):
            raise UserError(f"{condition}: write a condition as status=finished or test/loss<0.1.")
        name, sign, wanted = match.groups()
        column, word = pl.col(full_name(frame, name)), wanted.lower().strip("[]").replace(" ", "")
        number, other = (x.cast(pl.Float64, strict=False) for x in (column, pl.lit(wanted)))
        number = number.fill_nan(None)
        if sign in SIGNS:
            frame = frame.filter(SIGNS[sign](number, other))
            continue
        # A list equals its text, and each of its items.
        text = column.cast(pl.String).str.to_lowercase().str.strip_chars("[]").fill_null("null")
        is_equal = (text == word) | text.str.split(",").list.contains(word)
        is_equal |= (number == other).fill_null(value=False)
        frame = frame.filter(is_equal == (sign == "="))
    if frame.is_empty():
        raise UserError(f"No run satisfies the filters: 0 of {len(runs.frame)}.")
    return runs._replace(frame=frame)


def overview(runs: Runs, facts: Sequence[str] = SHOWN) -> pl.DataFrame:
    """Return for each run its state, the best of its objective, tests, settings that differ."""
    tested = [name for name in runs.frame.columns if name.startswith("test/")]
    # What a choice of strategy brings along is the same experiment; `diff` has it.
    settings = [name for name in differing(runs) if not name.startswith("trainer.strategy.")]
    names = ["run", "status", "best", *settings, *tested, *facts, "objective"]
    return runs.frame.select(names)


def best(runs: Runs, by: str | None, is_reversed: bool) -> tuple[list[dict[str, Any]], str]:
    """Average a metric over runs that differ in seed or fold alone; the best group comes first.

    Where the objective of a run is this metric, its best value counts. A row has the mean, half the
    width of its 95 % confidence interval (Student's t), the number of runs, the folder of the best
    run, and the settings that differ. The sentence says which end is the best one.
    """
    from scipy.special import stdtrit  # scikit-learn requires SciPy

    modes: dict[str, str] = dict(runs.frame.select("objective", "mode").drop_nulls().rows())
    if not by and len(modes) != 1:
        raise UserError(f"The runs have {len(modes)} objectives. Add --by METRIC.")
    name = full_name(runs.frame, by or next(iter(modes)))
    is_max = (modes.get(name, direction(name)) == "min") == is_reversed
    is_best = pl.col("objective").eq_missing(pl.lit(name)) & pl.col("best").is_not_null()
    score = pl.when(is_best).then("best").otherwise(name).cast(pl.Float64, strict=False)
    frame = runs.frame.with_columns(score=score).filter(pl.col("score").is_finite())
    if frame.is_empty():
        raise UserError(f"None of {len(runs.frame)} runs has a value of {name}.")
    settings = differing(runs._replace(frame=frame))
    keys = ["objective", *(key for key in settings if key not in (*REPEATS, name))]
    # Runs that are equal but for their folder are no repetitions: each is in a row of its own.
    repeats = [key for key in REPEATS if key in frame.columns]
    frame = frame.with_columns(copy=pl.int_range(pl.len()).over(*keys, *repeats))
    grouped = frame.sort("score", descending=is_max).group_by(*keys, "copy", maintain_order=True)
    rows = grouped.agg(
        pl.col("score").mean().alias(name),
        (pl.col("score").std() / pl.len().sqrt()).alias("± 95 %"),
        pl.len().alias("runs"),
        pl.col("run").first().alias("best run"),
    ).sort(name, descending=is_max)
    half = rows["± 95 %"] * pl.Series(stdtrit(rows["runs"] - 1, 0.975), dtype=pl.Float64)
    rows = rows.with_columns(half).select(name, "± 95 %", "runs", "best run", *keys[1:])
    return (
        rows.to_dicts(),
        f"the {'largest' if is_max else 'smallest'} {name} first; --reverse turns it",
    )


def difference(runs: Runs) -> list[dict[str, Any]]:
    """List in which settings, metrics and facts two runs differ."""
    names = runs.frame.columns
    metrics = [n for n in names[names.index("best") + 1 :] if n not in runs.settings]
    names = ["run", *differing(runs), *metrics, "status", "seconds", "samples/s", *GPU, "commit"]
    one, two = runs.frame.to_dicts()
    return [{"name": n, "one": one[n], "two": two[n]} for n in names if one[n] != two[n]]


def details(runs: Runs) -> list[dict[str, Any]]:
    """List all that is known of a run: also how it was started, with which code and data."""
    (facts,) = runs.frame.to_dicts()
    noted = record.read(Path(facts["run"]))
    starts = noted.get("starts") or [{}]
    facts |= noted | starts[-1] | {"starts": len(starts)}
    return [{"name": n, "value": str(v)} for n, v in facts.items() if v not in (None, "", {}, [])]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows: the first columns that the screen has room for, and the names of the others.

    Columns without a value are left out. The run's folder and the reason of a failure come last.
    """
    present = {name for row in rows for name, value in row.items() if value is not None}
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name in present]
    if len(names) > MOST_WHOLE:
        names.sort(key=LAST.__contains__)
    title = titles(names)
    columns = {name: [title[name], *(cell(row.get(name)) for row in rows)] for name in names}
    of_folders = [len(text) + 2 for name in FOLDERS for text in columns.get(name, [])]
    num_columns, shown = shutil.get_terminal_size(SCREEN).columns, list[list[str]]()
    room = max(num_columns - max(of_folders, default=0), num_columns // 2)
    for name, texts in columns.items():
        width = max(map(len, texts))
        if width <= room or name in LAST or len(columns) <= MOST_WHOLE:
            shown.append([text.ljust(width) for text in texts])
            room -= width + 2
            names.remove(name)
    lines = ["  ".join(line).rstrip() for line in zip(*shown, strict=True)]
    if names:
        lines.append(f"No room for: {', '.join(title[n] for n in names)}. --json has all.")
    print_text("\n".join(lines))


def cell(value: Any) -> str:
    """Return a value as a table shows it: numbers with five digits, nothing for what is unknown."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else printable(str(value))


def titles(names: Sequence[str]) -> dict[str, str]:
    """Shorten each key to its last part, where no other key has that."""
    counts = Counter(map(leaf, names))
    return {name: leaf(name) if counts[leaf(name)] == 1 else name for name in names}
