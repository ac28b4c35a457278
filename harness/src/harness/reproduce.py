"""``runs.py reproduce``: train a run again with its commit, diff and config, and compare by bit.

In: a finished run. Out: lines on what differs, and whether all is equal by bit.
"""

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import record
from harness.checkpoints.reading import read
from harness.command import run_folder
from harness.errors import UserError
from harness.names import few
from harness.processes import parent
from harness.record import git
from harness.runs import reading
from harness.runs.reading import RunFiles

FACTS = (
    "packages",
    "gpus",
    "cpu_capability",
    "num_threads",
    "strategy",
    "num_devices",
)


def reproduce(run: RunFiles, output: Path | None) -> bool:
    """Train a run again in a new folder, and print whether it has come to the same, by bit.

    Raises:
        UserError: if the run lacks something, or the training fails.
    """
    output = (output or run.folder / "reproduced" / time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    start = (run.record.get("starts") or [{}])[-1]
    place = Path(start.get("started_in", "."))  # where relative paths of data begin
    place = place if place.is_dir() else Path()
    if missing := _missing(run, start):
        raise UserError(f"{run.folder} cannot be made again: {missing}")
    run_folder.load_config(run.folder)  # raises if it was damaged, before anything is written
    top = start["repository"] if Path(start["repository"]).is_dir() else "."
    commit = git("log", "-1", "--format=%h by %an, %as: %s", start["commit"], folder=top)
    changes = f" and {start['diff']}" if start["diff"] else ""
    print(f"With your rights it runs the code of {commit.decode().strip()}{changes}.", flush=True)
    code = output / "code"
    git("clone", "--quiet", "--shared", "--no-checkout", ".", str(code), folder=top, seconds=None)
    git("checkout", "--quiet", "--detach", start["commit"], folder=code, seconds=None)
    if start["diff"]:
        diff = (run.folder / start["diff"]).resolve()
        git("apply", "--whitespace=nowarn", str(diff), folder=code, seconds=None)
    project = code / os.path.relpath(start["started_in"], start["repository"])
    _train(run, start, project, place, output / "run")
    again = reading.read(output / "run")
    now = again.record["starts"][-1]
    for name in FACTS:
        for line in differences(start.get(name), now.get(name), f"differs: {name}"):
            print(line)
    places = differences(reached(run.folder), reached(again.folder))
    verdict = f"NOT EQUAL: {few(places, 9)}" if places else "reproduced, equal by bit"
    print(f"{output}: {verdict}")
    return not places


def _missing(run: RunFiles, start: dict[str, Any]) -> str | None:
    """Say what the run lacks to be made again."""
    if run.status != "finished":
        return f"it is {run.status}. Let it finish with resume={run.folder}"
    if not start.get("commit") or "packages" not in start:
        return "it was trained outside of a git repository, or with version 0.3 or before."
    if "no_diff" in start:
        return f"what was not committed was not kept: {start['no_diff']}."
    return None


def _train(run: RunFiles, start: dict[str, Any], project: Path, place: Path, run_dir: Path) -> None:
    """Train with the run's config, and with the variables that decide how numbers are rounded."""
    frozen: Any = run_folder.load_config(run.folder)
    loggers = {k: node for k, node in (frozen.logger or {}).items() if "Table" in str(node)}
    frozen.update(resume=None, run_dir=str(run_dir), logger=loggers)
    run_dir.mkdir()
    run_folder.save_words(run_folder.load_words(run.folder), run_dir)
    run_folder.save_config(frozen, run_dir)
    inherited = parent.job_environment(run_dir)
    paths = project / "src", project, inherited.get("PYTHONPATH", "")
    environment = {k: v for k, v in inherited.items() if not record.ROUNDING.fullmatch(k)}
    environment |= start["environment"] | {"OMP_NUM_THREADS": str(start["num_threads"])}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    if status := subprocess.call(
        [sys.executable, project / "train.py"], cwd=place, env=environment
    ):
        raise UserError(f"It ended with exit status {status}; {run_dir / 'run.log'} says why.")


def reached(folder: Path) -> dict[str, Any]:
    """Collect what runs are compared by: checkpoints, metrics and results."""
    run = reading.read(folder)
    columns = {name: run.table[name].to_list() for name in run.table.columns}
    values: dict[str, Any] = {"metrics.csv": columns, "results.json": run.results}
    for name, numbers in values.items():  # no two runs take the same time
        values[name] = {k: v for k, v in numbers.items() if not k.startswith("throughput/")}
    for name in ("best.ckpt", "last.ckpt"):
        path = folder / "checkpoints" / name
        saved = read(path) if path.is_file() else {}
        keys = ("state_dict", "global_step", "optimizer_states", "lr_schedulers")
        values[name] = {key: saved.get(key) for key in keys}
    return values


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """List the places where two trees of values differ by a bit; a NaN equals a NaN."""
    if type(a) is not type(b):
        return [f"{where}: {type(a)} is not {type(b)}"]
    if isinstance(a, dict):
        places = [f"{where}: {key}" for key in a.keys() ^ b.keys()]
        return places + [d for k in a if k in b for d in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple, deque)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{where}[{i}]")]
    if isinstance(a, (np.ndarray, np.generic)):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if same else [where]
    if not isinstance(a, torch.Tensor):
        return [] if a == b or (a != a and b != b) else [f"{where}: {a!r:.60} != {b!r:.60}"]
    a, b = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return [f"{where}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"]
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return []
    return [f"{where} by at most {float((a.double() - b.double()).abs().max()):.2g}"]
