"""Train each kind of module under each strategy, and say how it ends.

The table of docs/strategies.md: python -m tests_harness.modules.cells
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

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
    """How a cell has ended, in words as those of kinds.py."""
    if found["status"] == TIMED_OUT:
        return "HANG"
    if any(text in found["said"] for text in BARE):
        return "TRACEBACK: " + sentence(found["said"])
    if found["status"]:
        return "refused: " + sentence(found["said"])
    if "values" not in reference:
        return "trained, and one process does not"
    apart = distances(found["values"], reference["values"])
    name = max(apart, key=apart.__getitem__)
    if apart[name] > SAME:
        return f"DIFFERENT: {name} {apart[name]:.1e} ({sum(v > SAME for v in apart.values())})"
    return "with" if found["settings"] else ""


def sentence(said: str) -> str:
    """What a refusal says, after a blank line."""
    return " ".join(said.strip().split("\n\n")[-1].split())


def row(name: str, strategies: list[str], forks: bool) -> dict[str, Any]:
    """The cells of a kind, the first of which is one process."""
    cells = {strategy: cell(KINDS[name], strategy, forks) for strategy in strategies}
    for found in cells.values():
        found["cell"] = described(found, cells["cpu"])
    for found in cells.values():
        found.pop("values", None)
    return cells


def main() -> None:
    """Print the table, or all that was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--strategy", action="append", help="besides cpu; default: all")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--real", action="store_true", help="commands as a user types them")
    parser.add_argument("--said", action="store_true", help="print what was said")
    arguments = parser.parse_args()
    strategies = [*dict.fromkeys(["cpu", *(arguments.strategy or STRATEGIES)])]
    if not arguments.json:
        print("|".join(["", "module", *strategies[1:], ""]))
        print("|---" * len(strategies) + "|")
    found = {}
    for name in arguments.kinds:
        found[name] = row(name, strategies, forks=not arguments.real)
        if not arguments.json:
            cells = [one["cell"] or "equal" for one in found[name].values()]
            print("|".join(["", name, *cells, ""]), flush=True)
        if arguments.said:
            for strategy, one in found[name].items():
                print(f"--- {strategy}\n{one['said']}")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
