"""Runs beside each other: in what they differ, and what they have reached."""

import math
import operator
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.runs.reading import RunFiles

REPEATS = ("seed", "data.seed", "data.fold")  # of one setting: `best` takes them together
FIRST = ("model.optimizer", "model", "data", "trainer", "init", "seed")
SIGNS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}
SIGNS |= {">": operator.gt, ">=": operator.ge}
COMPARISON = re.compile(r"(.+?)(<=|>=|!=|<|>|=)(.*)")
ABOUT: dict[str, Callable[[RunFiles], Any]] = {
    "run": lambda run: str(run.folder),
    "status": lambda run: run.status,
    "reason": lambda run: run.reason,
    "started": lambda run: run.started,
    "seconds": lambda run: run.seconds,
    "samples/s": lambda run: run.speed,
    "held back by": lambda run: str(run.record.get("verdict") or ""),
    "peak MiB": lambda run: run.record.get("peak_mib"),
    "commit": lambda run: str(run.record.get("commit") or "")[:10],
    "tags": lambda run: [str(tag) for tag in run.config.get("tags") or ()],
    "notes": lambda run: run.config.get("notes") or "",
    "step": lambda run: run.step,
    "best": lambda run: run.best,
}


def value_of(run: RunFiles, key: str) -> Any:
    """A fact, a metric or a setting of a run, by its name; ``None`` where it has none."""
    if key in ABOUT:
        return ABOUT[key](run)
    if key in run.metrics:
        return run.metrics[key]
    if key in run.settings or "." in key:
        return run.settings.get(key)
    named = [name for name in run.settings if _leaf(name) == key]  # as columns are called
    return run.settings[min(named, key=rank_of)] if named else None


def score_of(run: RunFiles, key: str) -> Any:
    """A metric of a run: its best where the best checkpoint was chosen by it, else its last."""
    best = value_of(run, "best") if run.objective == key else None
    return value_of(run, key) if best is None else best


def differing(runs: Sequence[RunFiles]) -> list[str]:
    """Settings that are not the same in all runs, the telling ones first.

    One of the same name and values, as ``data.seed`` taken from ``seed``, is left out.
    """
    known = [run.settings for run in runs if run.config]
    keys = dict.fromkeys(key for settings in known for key in settings)
    alike: dict[tuple[str, ...], list[str]] = {}  # by their values
    for key in sorted(keys, key=lambda key: (key.count("."), rank_of(key))):
        values = tuple(repr(settings.get(key)) for settings in known)
        others = alike.setdefault(values, [])
        if not any(_leaf(key) == _leaf(other) for other in others):
            others.append(key)
    found = [key for values, group in alike.items() if len({*values}) > 1 for key in group]
    return sorted(found, key=rank_of)


def rank_of(key: str) -> int:
    """The place of a setting among others: what is tried most comes first."""
    places = (i for i, name in enumerate(FIRST) if f"{key}.".startswith(f"{name}."))
    return next(places, len(FIRST))


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def chosen(runs: Sequence[RunFiles], conditions: Sequence[str]) -> list[RunFiles]:
    """The runs that satisfy all conditions, such as ``status=finished`` or ``test/loss<0.1``.

    Raises:
        UserError: if one is no condition, or no run has what it names.
    """
    for text in conditions:
        found = COMPARISON.fullmatch(text)
        if not found:
            raise UserError(f"{text}: write a condition as status=finished or test/loss<0.1.")
        key, sign, wanted = (part.strip() for part in found.groups())
        check_name(runs, key, f"{text}: ")
        runs = [run for run in runs if _holds(value_of(run, key), sign, wanted)]
    return list(runs)


def check_name(runs: Sequence[RunFiles], key: str, where: str = "") -> None:
    """Refuse a name that no run has.

    Raises:
        UserError: with names that come near.
    """
    names = {*ABOUT, *(name for run in runs for name in (*run.metrics, *run.settings))}
    leaves = {_leaf(name) for name in names}
    if runs and key not in names | leaves:
        import difflib

        near = difflib.get_close_matches(key, sorted(names | leaves), 3, 0.3)
        raise UserError(f"{where}no run has {key}. It may be {', '.join(near) or 'status'}.")


def _holds(value: Any, sign: str, wanted: str) -> bool:
    if isinstance(value, list):  # tags, or all of a list in any way to write it
        whole = [text.strip() for text in wanted.strip("[]").split(",")] == list(map(str, value))
        is_in = whole or any(_holds(item, "=", wanted) for item in value)
        return is_in == (sign == "=") if sign in ("=", "!=") else False
    try:
        one, two = float(value), float(wanted)
    except (TypeError, ValueError):
        same = str(value).lower() == wanted.lower() or (value is None and wanted == "null")
        return same if sign == "=" else not same if sign == "!=" else False
    return bool(SIGNS[sign](one, two))


def in_order(runs: Sequence[RunFiles], key: str, is_reversed: bool = False) -> list[RunFiles]:
    """Sort runs by a fact, a metric or a setting; those without it come last."""

    def rank(run: RunFiles) -> tuple[Any, ...]:
        value = value_of(run, key)
        if isinstance(value, (int, float)) and not math.isnan(value):
            return (0, value, "")
        return (1, 0.0, str(value)) if value not in (None, "") else (2, 0.0, "")

    known = [run for run in runs if rank(run)[0] < 2]
    rest = [run for run in runs if rank(run)[0] == 2]
    return sorted(known, key=rank, reverse=is_reversed) + rest


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed or their fold alone, and the mean of what they have reached.

    ``interval`` is half the width of the mean's 95 % confidence interval (Student's t).
    """

    runs: list[RunFiles]
    key: str
    mean: float
    interval: float | None


def groups(runs: Sequence[RunFiles], key: str, is_max: bool) -> list[Group]:
    """Runs by all settings but their seed and their fold, the best group first.

    Args:
        runs: those without the value are left out.
        key: a metric or fact.
        is_max: whether more is better.
    """
    values = [score_of(run, key) for run in runs]
    is_known = [isinstance(value, (int, float)) and math.isfinite(value) for value in values]
    runs = [run for run, known in zip(runs, is_known, strict=True) if known]
    names = [name for name in differing(runs) if name not in REPEATS]
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        found.setdefault(repr([run.settings.get(name) for name in names]), []).append(run)
    made = []
    for repeated in found.values():
        # What was run again counts once, as it was run last.
        by_time = sorted(repeated, key=lambda run: run.started or 0.0)
        same = list({tuple(map(run.settings.get, REPEATS)): run for run in by_time}.values())
        values = [float(score_of(run, key)) for run in same]
        made.append(Group(same, key, statistics.fmean(values), _interval(values)))
    return sorted(made, key=lambda group: group.mean, reverse=is_max)


def _interval(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # of SciPy, which scikit-learn brings

    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
