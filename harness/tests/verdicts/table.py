"""Compute the table of verdicts, and say what has changed.

    python -m tests.verdicts.table                        everything: an hour on two cores
    python -m tests.verdicts.table "class weights" plain  some kinds
    python -m tests.verdicts.table --strategy "ddp(2)" --write

``table.csv`` is what the harness does today with every kind of module and loader, and with public
modules, whose cells ``make packages`` computes. ``--write`` writes what has changed into it, but
what has become worse: whoever means that edits the file, and says why in the commit.
"""

import argparse
import csv
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.conftest import MODULES, ROOT
from tests.strategy_runs import STRATEGIES
from tests.verdicts.cells import GROUPS, Cell, row

PATH = Path(__file__).with_name("table.csv")
BAD = ("silent", "false alarm", "broken")
NEW = "new"  # in place of the verdict on a kind that the table does not have
Key = tuple[str, str, str]  # group, kind, strategy


class Row(NamedTuple):
    """A line of the table."""

    group: str
    kind: str
    strategy: str
    verdict: str
    difference: str = ""  # where it is told or silent; not compared
    says: str = ""  # what is told, or refused

    @property
    def key(self) -> Key:
        """Of which there is one line."""
        return self.group, self.kind, self.strategy


def read(path: Path = PATH) -> dict[Key, Row]:
    """Read the committed table."""
    with path.open(newline="") as file:
        rows = [Row(**line) for line in csv.DictReader(file)]
    return {row.key: row for row in rows}


def write(table: Mapping[Key, Row], path: Path = PATH) -> None:
    """Write the table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(table.values())


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
    is_now = f"{now.verdict} {far(now)}".rstrip() + f": {now.says}".rstrip(": ")
    return f"{worse}{', '.join(before.key)}: was {was}; is {is_now}"


def far(cell: Cell) -> str:
    """The difference, where there should be none."""
    return f"{cell.difference:.0e}" if cell.verdict in ("told", "silent") else ""


def new_row(key: Key, cell: Cell) -> Row:
    """A line of what was found."""
    return Row(*key, cell.verdict, far(cell), " ".join(cell.says.split()))


def main() -> None:
    """Print what has changed; exit with 1 if anything has."""
    os.chdir(ROOT)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", help="default: all")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES)
    parser.add_argument("--write", action="store_true", help="into table.csv")
    arguments = parser.parse_args()
    if unknown := {*arguments.kinds}.difference(*GROUPS.values()):
        parser.error(f"no such kinds: {', '.join(sorted(unknown))}")
    os.environ.setdefault("YAML_ALLOWED", MODULES)  # what the kinds' YAML files may name
    table, has_changed = read(), False
    for group, kinds in GROUPS.items():
        for kind in [k for k in kinds if not arguments.kinds or k in arguments.kinds]:
            for strategy, cell in row(group, kind, arguments.strategy or [*STRATEGIES]).items():
                key = group, kind, strategy
                said = change(table.get(key, Row(*key, NEW)), cell)
                if said:
                    has_changed = True
                    print(said, flush=True)
                if not said:
                    table[key] = table[key]._replace(difference=far(cell))
                elif not said.startswith("WORSE"):
                    table[key] = new_row(key, cell)
            if arguments.write:
                write(table)
    sys.exit(has_changed)


if __name__ == "__main__":
    main()
