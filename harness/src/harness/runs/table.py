"""Choose, group and compare runs, and print them.

In: runs as ``reading`` has read them. Out: rows, in which each run has its facts, metrics and
settings by their names, and lines on the screen. ``report`` draws them.
"""

import itertools
import json
import math
import operator
import re
import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.errors import UserError
from harness.names import did_you_mean, direction, leaf, shown
from harness.runs.reading import RunFiles

REPEATS = ("seed", "data.seed", "data.fold")  # repetitions of one setting: `best` averages them
SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
CONDITION = re.compile(r"(.+?)(<=|>=|!=|<|>|=)(.*)")
SCREEN = (120, 24)  # columns and lines where there is no terminal
LONGEST = 24  # characters of a setting in a list


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """List settings that are not the same in all runs, the outermost first.

    Of two that are equal everywhere, such as ``seed`` and ``data.seed``, one is listed.
    """
    known = [run.settings for run in runs if run.settings]  # a damaged run differs in none
    names: dict[tuple[str, ...], str] = {}
    for name in sorted(dict.fromkeys(itertools.chain(*known)), key=lambda name: name.count(".")):
        column = [str(settings.get(name)) for settings in known]
        if len({*column}) > 1:
            names.setdefault((leaf(name), *column), name)
    return [*names.values()]


def full_name(runs: Sequence[RunFiles], name: str) -> str:
    """Find a fact, a metric or a setting, which may be called by its last part."""
    names = dict.fromkeys(itertools.chain(*(run.values for run in runs)))
    if name in names:
        return name
    if inner := [one for one in names if one.endswith(f".{name}")]:
        return min(inner, key=lambda name: name.count("."))
    raise UserError(f"No run has {name}.{did_you_mean(name, names)}")


def chosen(runs: Sequence[RunFiles], conditions: Sequence[str]) -> list[RunFiles]:
    """Keep runs that satisfy all conditions, such as ``status=finished`` or ``test/loss<0.1``."""
    kept = [*runs]
    for condition in conditions:
        match = CONDITION.fullmatch(condition)
        if not match:
            raise UserError(f"{condition}: write a condition as status=finished or test/loss<0.1.")
        name, sign, wanted = match.groups()
        name = full_name(runs, name)
        kept = [run for run in kept if _satisfies(run.values.get(name), sign, wanted.lower())]
    if not kept:
        raise UserError(f"No run satisfies the filters: 0 of {len(runs)}.")
    return kept


def _satisfies(value: Any, sign: str, wanted: str) -> bool:
    """Compare numbers as numbers; a list equals its text, and each of its items."""
    try:
        number, other = float(value), float(wanted)
    except (TypeError, ValueError):
        number = other = math.nan
    if sign in SIGNS:
        return bool(SIGNS[sign](number, other))
    text = text_of("", value).lower().strip("[]") or "null"
    wanted = wanted.strip("[]").replace(" ", "")
    return (number == other or wanted in (text, *text.split(","))) == (sign == "=")


def groups(runs: Sequence[RunFiles], name: str, is_max: bool) -> list[dict[str, Any]]:
    """Average a metric over runs that differ in seed or fold alone; the best group comes first.

    Where the objective of a run is this metric, its best value counts. A row has the mean, half the
    width of its 95 % confidence interval (Student's t), the number of runs, the folder of the best
    run, and the settings that differ.
    """
    from scipy.special import stdtrit  # scikit-learn requires SciPy

    def score(run: RunFiles) -> float:
        is_best = run.objective[0] == name and run.best is not None
        value = run.best if is_best else run.values.get(name)
        return value if isinstance(value, (int, float)) else math.nan

    runs = [run for run in runs if math.isfinite(score(run))]
    keys = [key for key in differing(runs) if key not in REPEATS]
    members: dict[tuple[Any, ...], list[RunFiles]] = {}
    copies: Counter[tuple[str, ...]] = Counter()
    for run in runs:
        settings, repeat = ([str(run.settings.get(k)) for k in names] for names in (keys, REPEATS))
        # Runs that are equal but for their folder are no repetitions: each is in a row of its own.
        copies[(*settings, *repeat)] += 1
        members.setdefault((*settings, copies[(*settings, *repeat)]), []).append(run)
    rows = []
    for group in members.values():
        scores, num = [*map(score, group)], len(group)
        width = stdtrit(num - 1, 0.975) * statistics.stdev(scores) / num**0.5 if num > 1 else None
        best = (max if is_max else min)(group, key=score)
        row = {
            name: statistics.fmean(scores),
            "± 95 %": width,
            "runs": num,
            "best run": str(best.folder),
        }
        rows.append(row | {key: best.settings.get(key) for key in keys})
    return sorted(rows, key=lambda row: row[name], reverse=is_max)


def print_list(runs: Sequence[RunFiles], as_json: bool = False) -> None:
    """Print a row for each run: its state, the best of its objective, the settings that differ."""
    runs = sorted(runs, key=lambda run: run.facts["started"] or 0.0)
    tested = [name for run in runs for name in run.results if name.startswith("test/")]
    names = dict.fromkeys(["run", "status", "objective", "best", *tested, *differing(runs)])
    names = dict.fromkeys(runs[0].facts) | names if as_json else names
    show([{name: run.values.get(name) for name in names} for run in runs], as_json, LONGEST)
    for run in () if as_json else runs:
        if run.reason:
            print(f"{shown(run.folder)}: {run.status}, {run.reason}")


def print_best(runs: Sequence[RunFiles], by: str | None, is_reversed: bool, as_json: bool) -> None:
    """Print groups of runs by one metric, by default their objective, the best first."""
    modes = dict(run.objective for run in runs if run.objective[0])
    if not by and len(modes) != 1:
        raise UserError(f"The runs have {len(modes)} objectives. Add --by METRIC.")
    name = full_name(runs, by or next(iter(modes)))
    is_loss = modes.get(name, direction(name)) == "min"
    rows = groups(runs, name, is_max := is_loss == is_reversed)
    if not rows:
        raise UserError(f"None of {len(runs)} runs has a value of {name}.")
    if not as_json:
        print(f"the {'largest' if is_max else 'smallest'} {name} first; --reverse turns it")
    show(rows, as_json, LONGEST)


def print_difference(one: RunFiles, two: RunFiles, as_json: bool = False) -> None:
    """Print in which settings, metrics and facts two runs differ."""
    names = dict.fromkeys([*differing([one, two]), *one.results, *two.results])
    names |= dict.fromkeys(["status", "seconds", "samples/s", "commit"])
    pairs = [(name, one.values.get(name), two.values.get(name)) for name in names]
    rows = [{"name": name, "one": a, "two": b} for name, a, b in pairs if a != b]
    if not as_json:
        same = "" if rows else "\nTheir settings and what they have reached are the same."
        print(f"one is {shown(one.folder)}, two is {shown(two.folder)}{same}")
    show(rows, as_json)


def print_one(run: RunFiles, as_json: bool = False) -> None:
    """Print all that is known of a run: also how it was started, with which code and data."""
    starts = run.record.get("starts") or [{}]
    facts = run.values | run.record | starts[-1] | {"starts": len(starts)}
    known = {name: value for name, value in facts.items() if value not in (None, "", {}, [])}
    show([{"name": name, "value": str(value)} for name, value in known.items()], as_json)


def show(rows: Sequence[dict[str, Any]], as_json: bool = False, longest: int = 10**6) -> None:
    """Print rows: for a person the columns that fit on the screen, four at least.

    ``longest`` is the number of characters of a cell that are shown, where it is not a folder.
    """
    if as_json:
        print(json.dumps(rows))
        return
    names = [
        *dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    ]
    table = [titles(names)]
    for row in rows:
        cells = {name: text_of(name, row[name]) for name in names}
        table.append([c if name.endswith("run") else c[:longest] for name, c in cells.items()])
    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    screen = shutil.get_terminal_size(SCREEN).columns
    num = max(4, sum(total <= screen + 2 for total in itertools.accumulate(widths)))
    for line in table:
        print("".join(map(str.ljust, line[:num], widths)).rstrip())
    if len(names) > num:
        print(f"{len(names) - num} more columns: a wider screen or --json has them.")


def titles(names: Sequence[str]) -> list[str]:
    """Shorten each key to its last part, where no other key has that."""
    counts = Counter(map(leaf, names))
    return [leaf(name) if counts[leaf(name)] == 1 else name for name in names]


def text_of(name: str, value: Any) -> str:
    """Write a value as a person reads it."""
    if value is None:
        return ""
    if name in ("run", "best run"):
        return shown(value)
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
