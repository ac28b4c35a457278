"""Train with a kind of loader under a strategy, whole and resumed, and say what came out.

The table of docs/strategies.md: python -m tests_harness.loaders.cells
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from harness.checkpoints.lookup import by_step, link_newest
from tests_harness.faults.fast_command import Forked
from tests_harness.faults.run_folder import contents, differences
from tests_harness.loaders import libraries

KINDS = (
    *("plain", "shuffled", "weighted", "bucketed", "by tokens", "endless", "several"),
    *("stream in parts", "stream with state", "stream", "own order", "made batches"),
    *("own iteration", "distributed", "several uneven", "of the module"),
    *("overridden", "streams of a DataModule", "longest", "own generator", "random split"),
    *("random collate", "moved at random", "empty"),
)
STRATEGIES: dict[str, tuple[str, ...]] = {
    "cpu": ("strategy=cpu",),
    "dp(2)": ("strategy=dp", "trainer.devices=2"),
    "ddp(2)": ("strategy=ddp", "trainer.devices=2"),
    "ddp(3)": ("strategy=ddp", "trainer.devices=3"),
    "ddp2(2x2)": ("strategy=ddp2", "trainer.devices=2", "trainer.num_nodes=2"),
}
ZOO = "tests_harness.loaders.zoo"
COMMON = (
    "trainer.precision=64-true",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=3",
    "trainer.enable_progress_bar=false",
    "callbacks.learning_rate=null",
    "logger.tensorboard=null",
    "checkpoint.every_n_steps=1",
    "checkpoint.num_kept=1000",
)
FORKS = True  # commands of one program; slower ones are started as a user does
RESUMED_AT = 7  # in the middle of the second epoch
SAME = 1e-9  # in 64 bits: sums over processes are added up in another order


def words(kind: str, num_workers: int, folder: Path) -> list[str]:
    """Write what a user writes in YAML; the command's words that choose it."""
    owned = {"overridden": "Overridden", "streams of a DataModule": "OfStreams"}
    data = f"_target_: {ZOO}.{owned.get(kind, 'Data')}\nnum_workers: {num_workers}\n"
    data += "batch_size: 8\n" if kind in owned else f"kind: {kind}\n"
    modules = {"of the module": "WithLoaders", "moved at random": "MovedAtRandom"}
    model = f"_target_: {ZOO}.{modules.get(kind, 'Module')}\n"
    for group, text in (("data", data), ("model", model)):
        path = folder / "conf" / group / "mine.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    chosen = "null" if kind == "of the module" else "mine"
    extra = ["trainer.limit_train_batches=5"] if kind == "endless" else []
    return [*extra, f"hydra.searchpath=[file://{folder}/conf]", f"data={chosen}", "model=mine"]


def execute(arguments: list[str], strategy: str, folder: Path) -> tuple[int, str]:
    """Run ``train.py``; the status of the first process, and what was said."""
    num_nodes = 2 if "num_nodes=2" in " ".join(STRATEGIES[strategy]) else 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = folder / "said.txt"
    command = ["train.py", *COMMON, *STRATEGIES[strategy], f"output_dir={folder}", *arguments]
    processes: list[Any] = []
    for node in range(num_nodes):
        env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= {"NODE_RANK": str(node)} if num_nodes > 1 else {}
        with said.open("ab") as file:
            if FORKS:
                processes.append(Forked(command, env, output=file.fileno()))
            else:  # a library may not live on in a fork
                program = [sys.executable, *command]
                processes.append(subprocess.Popen(program, env=env, stdout=file, stderr=file))
    statuses = [process.wait(timeout=120) for process in processes]
    return max(statuses), said.read_text()


def cell(kind: str, strategy: str, folder: Path, num_workers: int = 0) -> dict[str, Any]:
    """The weights and results of a whole run, and where a resumed one differs from it."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries.write(kind, folder)
    status, said = execute([*words(kind, num_workers, folder), "name=whole"], strategy, folder)
    if status:
        return {"status": status, "said": said}
    (whole,) = (folder / "whole").iterdir()
    shutil.copytree(whole, folder / "reference", symlinks=True)
    steps = by_step(whole / "checkpoints")
    for path in steps[RESUMED_AT:]:
        path.unlink()
    link_newest(steps[RESUMED_AT - 1])
    (whole / "results.json").unlink()
    status, more = execute([f"resume={whole}"], strategy, folder)
    found = {"status": 0, "said": said, **outcome(folder / "reference")}
    again = {"status": status, "said": more[len(said) :]}
    if not status:
        again |= outcome(whole)
        again["differences"] = differences(contents(folder / "reference"), contents(whole))
    return found | {"resumed": again}


def outcome(run_dir: Path) -> dict[str, Any]:
    """The last weights of a run, and its results."""
    last = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    results = json.loads((run_dir / "results.json").read_text())
    return {"weights": last["state_dict"], "results": results}


def farthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of weights and results."""
    pairs = [(a["weights"][k], b["weights"][k]) for k in a["weights"]]
    pairs += [(torch.tensor(a["results"][k]), torch.tensor(b["results"][k])) for k in a["results"]]
    return max(float((x - y).abs().max()) for x, y in pairs)


def row(kind: str, strategies: list[str], num_workers: int) -> dict[str, Any]:
    """The cells of a kind, with distances in place of weights."""
    cells: dict[str, Any] = {}
    for strategy in strategies:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            cells[strategy] = cell(kind, strategy, Path(folder, "cell"), num_workers)
    found = [one for one in cells.values() if not one["status"]]
    for one in found:
        one["from_one_process"] = farthest(found[0], one)
        again = one["resumed"]
        if not again["status"]:
            again["distance"] = farthest(one, again)
    for one in found:
        for values in (one, one["resumed"]):
            values.pop("weights", None)
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
    global FORKS
    FORKS = not arguments.real
    strategies, found = arguments.strategy or [*STRATEGIES], {}
    if not arguments.json:
        print("|".join(["", "loader", *strategies, ""]))
        print("|---" * (len(strategies) + 1) + "|")
    for kind in arguments.kinds:
        found[kind] = row(kind, strategies, arguments.workers)
        if not arguments.json:
            print("|".join(["", kind, *map(shown, found[kind].values()), ""]), flush=True)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
