"""Compute the table of verdicts, and print the changes.

    python -m tests.verdicts.table                        everything: an hour on two cores
    python -m tests.verdicts.table "class weights" plain  some kinds
    python -m tests.verdicts.table plain --write

``table.csv`` has the library's verdicts on every kind of module and loader, and on public
modules, whose cells ``make packages`` computes. ``--write`` writes changed verdicts into it, but
no worse ones: to accept these, edit the file and give the reason in the commit.
"""

import argparse
import csv
import os
import sys
from pathlib import Path
from typing import NamedTuple

from tests.conftest import MODULES, ROOT
from tests.verdicts.cells import GROUPS, Cell, row, strategies_of

PATH = Path(__file__).with_name("table.csv")
BAD = ("silent", "false alarm", "broken")
NEW = "new"  # in place of the verdict on a kind that the table does not have
Key = tuple[str, str, str]  # group, kind, strategy


class Row(NamedTuple):
    """A line of the table; there is one of each group, kind and strategy."""

    group: str
    kind: str
    strategy: str
    verdict: str
    difference: str = ""  # for told and silent; not compared
    says: str = ""  # part of the warning or the error


def read() -> dict[Key, Row]:
    """Read the committed table."""
    with PATH.open(newline="") as file:
        rows = [Row(**line) for line in csv.DictReader(file)]
    return {row[:3]: row for row in rows}


def is_worse(before: str, now: str) -> bool:
    """Whether a verdict may not take the place of another one; any may be the first of a kind."""
    return before not in (now, NEW) and (now in BAD or before in ("equal", "set"))


def change(before: Row, now: Cell) -> str:
    """How a cell differs from the table; empty if it does not."""
    says = "".join(now.said.split())  # whatever the width of the lines
    if before.verdict == now.verdict and "".join(before.says.split()) in says:
        return ""
    worse = "WORSE: " if is_worse(before.verdict, now.verdict) else ""
    was = f"{before.verdict}: {before.says}".rstrip(": ")
    is_now = f"{now.verdict} {now.far}".rstrip() + f": {now.says}".rstrip(": ")
    return f"{worse}{', '.join(before[:3])}: was {was}; is {is_now}"


def main() -> None:
    """Print what has changed; exit with 1 if anything has."""
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="default: all")
    parser.add_argument("--write", action="store_true", help="into table.csv")
    arguments = parser.parse_args()
    if unknown := {*arguments.kinds}.difference(*GROUPS.values()):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    os.environ.setdefault("YAML_ALLOWED", MODULES)  # what the kinds' YAML files may name
    table, has_changed = read(), False
    for group, kinds in GROUPS.items():
        for kind in [k for k in kinds if not arguments.kinds or k in arguments.kinds]:
            for strategy, cell in row(group, kind, strategies_of(group)).items():
                key = group, kind, strategy
                if said := change(table.get(key, Row(*key, NEW)), cell):
                    has_changed = True
                    print(said, flush=True)
                if not said:
                    table[key] = table[key]._replace(difference=cell.far)
                elif not said.startswith("WORSE"):
                    table[key] = Row(*key, cell.verdict, cell.far, " ".join(cell.says.split()))
    if arguments.write:
        with PATH.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Row._fields)
            writer.writerows(table.values())
    sys.exit(has_changed)


if __name__ == "__main__":
    main()
