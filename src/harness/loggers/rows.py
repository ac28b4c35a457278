"""The numbers of a run as trackers take them, and how much of them one holds."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence

Row = tuple[int, dict[str, float]]  # a step, and values by their names


def values_in(rows: Iterable[Row]) -> Counter[str]:
    """How many values of each name rows have."""
    return Counter(name for _, row in rows for name in row)


def without(rows: Sequence[Row], counts: Counter[str]) -> list[Row]:
    """The rows without so many of the first values of each name."""
    seen, found = Counter[str](), []
    for step, row in rows:
        seen.update(row.keys())
        if left := {name: value for name, value in row.items() if seen[name] > counts[name]}:
            found.append((step, left))
    return found


def is_beginning(held: Sequence[Row], rows: Sequence[Row]) -> bool:
    """Whether what a tracker holds is how rows begin, by names."""
    ours, theirs = by_name(rows), by_name(held)
    return all(ours.get(name, [])[: len(points)] == points for name, points in theirs.items())


def by_name(rows: Iterable[Row]) -> dict[str, list[tuple[int, str]]]:
    """Steps and values of each name; as texts, because NaN equals nothing."""
    found: dict[str, list[tuple[int, str]]] = {}
    for step, row in rows:
        for name, value in row.items():
            limited = min(max(value, -sys.float_info.max), sys.float_info.max)  # as MLflow has them
            found.setdefault(name, []).append((step, repr(value if value != value else limited)))
    return found
