"""Train with a kind of loader under a strategy, whole and resumed, and say what came out.

The table of docs/strategies.md: python -m tests_harness.loaders.cells
"""

import argparse
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from harness.checkpoints.lookup import by_step, link_newest
from tests_harness.faults.run_folder import contents, differences
from tests_harness.loaders import libraries
from tests_harness.runs import SAME, STRATEGIES, execute, farthest, outcome, write_conf

KINDS = (
    *("plain", "shuffled", "weighted", "bucketed", "by tokens", "endless", "several"),
    *("stream in parts", "stream with state", "stream", "own order", "made batches"),
    *("own iteration", "distributed", "several uneven", "of the module"),
    *("overridden", "streams of a DataModule", "longest", "own generator", "random split"),
    *("random collate", "moved at random", "empty"),
)
ZOO = "tests_harness.loaders.zoo"
CHECKPOINTS = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=1000")
RESUMED_AT = 7  # in the middle of the second epoch


def words(kind: str, num_workers: int, folder: Path) -> list[str]:
    """Write what a user writes in YAML; the command's words that choose it."""
    owned = {"overridden": "Overridden", "streams of a DataModule": "OfStreams"}
    data = f"_target_: {ZOO}.{owned.get(kind, 'Data')}\nnum_workers: {num_workers}\n"
    data += "batch_size: 8\n" if kind in owned else f"kind: {kind}\n"
    modules = {"of the module": "WithLoaders", "moved at random": "MovedAtRandom"}
    model = f"_target_: {ZOO}.{modules.get(kind, 'Module')}\n"
    mine = write_conf(folder, data=data, model=model)
    extra = ["trainer.limit_train_batches=5"] if kind == "endless" else []
    extra += ["data=null"] if kind == "of the module" else []
    return [*mine, *CHECKPOINTS, *extra]


def cell(kind: str, strategy: str, folder: Path, num_workers: int, forks: bool) -> dict[str, Any]:
    """The weights and results of a whole run, and where a resumed one differs from it."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries.write(kind, folder)
    run = partial(execute, strategy=strategy, folder=folder, forks=forks)
    status, said = run([*words(kind, num_workers, folder), "name=whole"])
    if status:
        return {"status": status, "said": said}
    (whole,) = (folder / "whole").iterdir()
    shutil.copytree(whole, folder / "reference", symlinks=True)
    steps = by_step(whole / "checkpoints")
    for path in steps[RESUMED_AT:]:
        path.unlink()
    link_newest(steps[RESUMED_AT - 1])
    (whole / "results.json").unlink()
    status, more = run([f"resume={whole}", *CHECKPOINTS])
    found = {"status": 0, "said": said, "values": outcome(folder / "reference")}
    again = {"status": status, "said": more[len(said) :]}
    if not status:
        again["values"] = outcome(whole)
        again["differences"] = differences(contents(folder / "reference"), contents(whole))
    return found | {"resumed": again}


def row(kind: str, strategies: list[str], num_workers: int, forks: bool) -> dict[str, Any]:
    """The cells of a kind, with distances in place of weights."""
    cells: dict[str, Any] = {}
    for strategy in strategies:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            cells[strategy] = cell(kind, strategy, Path(folder, "cell"), num_workers, forks)
    found = [one for one in cells.values() if not one["status"]]
    for one in found:
        one["from_one_process"] = farthest(found[0]["values"], one["values"])
        again = one["resumed"]
        if not again["status"]:
            again["distance"] = farthest(one["values"], again["values"])
    for one in found:
        for each in (one, one["resumed"]):
            each.pop("values", None)
    return cells


def shown(one: dict[str, Any]) -> str:
    """A cell of the table."""
    if one["status"]:
        return "refused"
    is_equal = one["from_one_process"] < SAME
    again = one["resumed"]
    if again["status"]:
        resumed = "not resumed"
    elif again["distance"] > SAME:
        resumed = "resumed with other batches"
    else:
        resumed = "resumed equal" + ("" if again["differences"] else " by bit")
    return ("equal" if is_equal else "other batches") + ", " + resumed


def main() -> None:
    """Print the table, or all that was found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--real", action="store_true", help="commands as a user types them")
    arguments = parser.parse_args()
    strategies, found = arguments.strategy or [*STRATEGIES], {}
    if not arguments.json:
        print("|".join(["", "loader", *strategies, ""]))
        print("|---" * (len(strategies) + 1) + "|")
    for kind in arguments.kinds:
        found[kind] = row(kind, strategies, arguments.workers, not arguments.real)
        if not arguments.json:
            print("|".join(["", kind, *map(shown, found[kind].values()), ""]), flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
