"""Train each kind of module under each strategy, and say how it ends.

The table of docs/strategies.md: python -m tests_harness.modules.cells
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests_harness.conftest import ROOT
from tests_harness.modules.kinds import KINDS, Kind
from tests_harness.runs import (
    SAME,
    STRATEGIES,
    TIMED_OUT,
    distances,
    execute,
    outcome,
    write_conf,
)

PACKAGE = "tests_harness.modules"
BARE = ("Traceback (most recent call last)", "terminate called")  # nothing that a user can read


def words(kind: Kind, folder: Path) -> list[str]:
    """The words of the kind's command."""
    data = f"_target_: {PACKAGE}.data.{kind.data}\ndataset: {kind.dataset}\n"
    chosen = write_conf(folder, data=data, model=f"_target_: {PACKAGE}.{kind.model}\n")
    return [*chosen, *kind.words, "name=run"]


def cell(kind: Kind, strategy: str, forks: bool) -> dict[str, Any]:
    """Run a kind; again with those of its settings that a refusal names."""
    settings: list[str] = []
    while True:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name)
            status, said = execute([*words(kind, folder), *settings], strategy, folder, forks)
            found = {"status": status, "said": said, "settings": settings}
            if status == 0:
                (run_dir,) = (folder / "run").iterdir()
                return found | {"values": outcome(run_dir)}
        named = [s for s in kind.settings if s.partition("=")[0] in said and s not in settings]
        if not named:
            return found
        settings = [*settings, *named]


def described(found: dict[str, Any], reference: dict[str, Any]) -> str:
    """How a cell has ended, in words as those of kinds.py; in capitals what nobody expects."""
    if found["status"] == TIMED_OUT:
        return "HANG"
    if any(text in found["said"] for text in BARE):
        return "TRACEBACK: " + last_paragraph(found["said"])
    if found["status"]:
        return "refused: " + last_paragraph(found["said"])
    if "values" not in reference:
        return "TRAINED, and one process does not"
    apart = distances(found["values"], reference["values"])
    name = max(apart, key=apart.__getitem__)
    if apart[name] > SAME:
        return f"different: {name} by {apart[name]:.1e}"
    return "with" if found["settings"] else ""


def last_paragraph(said: str) -> str:
    """What a command has said last, in one line."""
    return " ".join(said.strip().split("\n\n")[-1].split())


def is_expected(expected: str, found: dict[str, Any]) -> bool:
    """Whether a cell is as kinds.py says, and whether it is told."""
    way, _, text = expected.partition(": ")
    if way not in ("refused", "different"):
        return bool(found["cell"] == expected)
    told = found["said"]
    if text.startswith("docs: "):
        told = (ROOT / "docs" / "strategies.md").read_text()
    is_told = text.removeprefix("docs: ") in " ".join(told.split())
    return is_told and str(found["cell"]).startswith(f"{way}: ")


def row(name: str, strategies: list[str], forks: bool) -> dict[str, Any]:
    """The cells of a kind, the first of which is one process."""
    cells = {strategy: cell(KINDS[name], strategy, forks) for strategy in strategies}
    for found in cells.values():
        found["cell"] = described(found, cells["cpu"])
    for found in cells.values():
        found.pop("values", None)
    return cells


def line(name: str, cells: list[str]) -> str:
    """A row of the table, with the settings of the kind."""
    settings = [f"`{s.removeprefix('trainer.strategy.')}`" for s in KINDS[name].settings]
    shown = {"": "equal", "with": "set"}
    return "|".join(["", "; ".join([name, *settings]), *(shown.get(c, c) for c in cells), ""])


def way(cell: str) -> str:
    """A cell without what is told."""
    way, _, text = cell.partition(": ")
    is_told = way == "different" and not text.startswith("docs: ")
    return "different, told" if is_told else way


def table() -> str:
    """The table of the docs, as kinds.py expects it."""
    strategies = [*STRATEGIES][1:]
    lines = ["|".join(["", "module", *strategies, ""]), "|---" * len(STRATEGIES) + "|"]
    for name, kind in KINDS.items():
        lines.append(line(name, [way(kind.expected(strategy)) for strategy in strategies]))
    return "\n".join(lines)


def main() -> None:
    """Run cells, and print the table; exit with 1 if a cell is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--strategy", action="append", help="besides cpu; default: all")
    parser.add_argument("--json", action="store_true", help="all that was found")
    parser.add_argument("--text", action="store_true", help="what the cells say")
    parser.add_argument("--real", action="store_true", help="commands as a user types them")
    arguments = parser.parse_args()
    strategies = [*dict.fromkeys(["cpu", *(arguments.strategy or STRATEGIES)])]
    found: dict[str, Any] = {}
    unexpected = []
    if not arguments.json:
        print("|".join(["", "module", *strategies[1:], ""]))
        print("|---" * len(strategies) + "|")
    for name in arguments.kinds:
        found[name] = row(name, strategies, forks=not arguments.real)
        cells = []
        for strategy, one in found[name].items():
            expected = KINDS[name].expected(strategy)
            if not is_expected(expected, one):
                unexpected.append(f"{name}, {strategy}: {one['cell'] or 'equal'}")
            as_expected = is_expected(expected, one) and not arguments.text
            cells.append(way(expected) if as_expected else one["cell"])
        if not arguments.json:
            print(line(name, cells[1:]), flush=True)
    if arguments.json:
        print(json.dumps(found))
    elif unexpected:
        sys.exit("Not as kinds.py says:\n" + "\n".join(unexpected))


if __name__ == "__main__":
    main()
