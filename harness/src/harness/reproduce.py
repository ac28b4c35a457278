"""``runs.py reproduce``: train a run again with its commit, diff and config, and compare by bit.

In: a finished run. Out: lines on what differs, and whether all is equal by bit.
"""

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from harness import code_version, frozen_files, record
from harness.checkpoints.reading import read
from harness.command import run_folder
from harness.data.checksum import checksum
from harness.errors import UserError
from harness.names import few
from harness.processes import launch
from harness.repository import git
from harness.runs import reading
from harness.runs.reading import CONFIG, METRICS, RESULTS, RunFiles

FACTS = ("data", "processor", "gpus", "cpu_capability", "num_threads", "strategy", "num_devices")
STATES = ("optimizer_states", "lr_schedulers")
TIMINGS = "throughput/"  # no two runs take the same time


def reproduce(run: RunFiles, output: Path | None) -> bool:
    """Train a run again in a new folder, and print whether it has come to the same, by bit.

    Args:
        run: to train again.
        output: the new folder; by default one inside of the run's.

    Raises:
        UserError: if the run lacks something, or the training fails.
    """
    output = output or run.folder / "reproduced" / time.strftime("%Y-%m-%d_%H-%M-%S")
    start = (run.record.get("starts") or [{}])[-1]
    place = Path(start.get("started_in", "."))  # where relative paths of data begin
    place = place if place.is_dir() else Path.cwd()
    if missing := [*_missing(run, start, place)]:
        raise UserError("\n  ".join([f"{run.folder} cannot be made again.", *missing]))
    top = start["repository"] if Path(start["repository"]).is_dir() else "."
    commit = git("log", "-1", "--format=%h by %an, %as: %s", start["commit"], folder=top)
    changes = f"and {start['diff']}" if start["diff"] else "with no changes"
    print(f"With your rights it runs the code of {commit.decode().strip()}, {changes}.", flush=True)
    for line in code_version.versions(start["code"]["packages"], code_version.packages()):
        print(f"differs: {line}", flush=True)
    try:
        output.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{output} cannot be made: {error.strerror}. Use --output.") from error
    program = _check_out(run, start, top, output.resolve() / "code")
    again = _train(run, start, program, place, output.resolve() / "run")
    return _compare(run, again, output)


def _train(
    run: RunFiles, start: dict[str, Any], program: Path, place: Path, run_dir: Path
) -> RunFiles:
    """Train with the run's config and with what decides how numbers are rounded."""
    frozen: Any = OmegaConf.create(frozen_files.read_yaml(run.folder / CONFIG))
    loggers = {k: node for k, node in (frozen.logger or {}).items() if "Table" in str(node)}
    frozen.update(resume=None, run_dir=str(run_dir), logger=loggers)
    run_dir.mkdir()
    run_folder.save_words(run_folder.load_words(run.folder), run_dir)
    run_folder.save_config(frozen, run_dir)
    inherited = launch.job_environment(run_dir)
    paths = program.parent / "src", program.parent, inherited.get("PYTHONPATH", "")
    environment = {k: v for k, v in inherited.items() if not record.ROUNDING.fullmatch(k)}
    environment |= {k: v for k, v in start["environment"].items() if record.ROUNDING.fullmatch(k)}
    environment |= {"OMP_NUM_THREADS": str(start["num_threads"])}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    if status := subprocess.call([sys.executable, program], cwd=place, env=environment):
        raise UserError(f"It ended with exit status {status}; {run_dir / 'run.log'} says why.")
    return reading.read(run_dir)


def _compare(run: RunFiles, again: RunFiles, output: Path) -> bool:
    """Print where two runs differ, in their machine and in what they have reached."""
    one, two = ({**r.record["starts"][-1], **r.record} for r in (run, again))
    for line in [x for name in FACTS for x in differences(one.get(name), two.get(name), name)]:
        print(f"differs: {line}")
    first, second, is_equal = reached(run.folder), reached(again.folder), True
    for name in first:
        places = differences(first[name], second[name], name)
        print(f"{name}: " + (f"NOT EQUAL: {few(places, 3)}" if places else "equal by bit"))
        is_equal = is_equal and not places
    print(f"{output}: " + ("reproduced, equal by bit" if is_equal else "not reproduced"))
    return is_equal


def _missing(run: RunFiles, start: dict[str, Any], place: Path) -> Iterator[str]:
    """List what the run lacks to be made again."""
    if run.status != "finished":
        yield f"It is {run.status}: let it finish with resume={run.folder}"
    if "code" not in start or not re.fullmatch("[0-9a-f]{40,}", start.get("commit") or ""):
        yield "It was trained outside of a git repository, or with version 0.3 or before."
    elif "no_diff" in start:
        yield f"What was not committed was not kept: {start['no_diff']}."
    codes = {str(one["code"]["sources"]) for one in run.record.get("starts", []) if "code" in one}
    if len(codes) > 1:
        yield "Its code has changed while it was stopped: no single code gives this run."
    for key, file in run.record.get("data", {}).get("files", {}).items():
        if checksum(str(place / file["path"])) != file["crc32"]:
            yield f"{key}: {place / file['path']} is gone, or holds other data than then."


def _check_out(run: RunFiles, start: dict[str, Any], top: str, code: Path) -> Path:
    """Clone the repository's commit, apply the diff, and return the program that trains."""
    git("clone", "--quiet", "--shared", "--no-checkout", ".", str(code), folder=top, seconds=None)
    git("checkout", "--quiet", "--detach", start["commit"], folder=code, seconds=None)
    if start["diff"]:
        diff = (run.folder / start["diff"]).resolve()
        git("apply", "--whitespace=nowarn", str(diff), folder=code, seconds=None)
    inside = Path(os.path.relpath(start["started_in"], start["repository"]))
    for folder in (inside, *inside.parents):
        if ".." not in folder.parts and (code / folder / "train.py").is_file():
            return code / folder / "train.py"
    raise UserError(f"{top} has no train.py at commit {start['commit']}.")


def reached(folder: Path) -> dict[str, Any]:
    """Collect what runs are compared by: weights, states of optimizers, metrics and results."""
    values: dict[str, Any] = {}
    for name in ("best.ckpt", "last.ckpt"):
        path = folder / "checkpoints" / name
        saved = read(path) if path.is_file() else {}
        values[name] = {key: saved.get(key) for key in ("state_dict", "global_step", *STATES)}
    table, results = reading.read_table(folder / METRICS), reading.read(folder).results
    values[METRICS] = {k: table[k].to_list() for k in table.columns if TIMINGS not in k}
    values[RESULTS] = {k: v for k, v in (results or {}).items() if TIMINGS not in k}
    return values


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """List the places where two trees of values differ by a bit; a NaN equals a NaN."""
    if type(a) is not type(b):
        return [f"{where}: {type(a)} is not {type(b)}"]
    if isinstance(a, torch.Tensor):
        return _of_tensors(a, b, where)
    if isinstance(a, (np.ndarray, np.generic)):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if same else [where]
    if isinstance(a, dict):
        keys = sorted(a.keys() ^ b.keys(), key=str)
        places = [f"{where}: {keys}"] if keys else []
        for key in [key for key in a if key in b]:
            places += differences(a[key], b[key], f"{where}/{key}")
        return places
    if isinstance(a, (list, tuple, deque)) and len(a) == len(b):
        pairs = zip(a, b, strict=True)
        return [d for i, (x, y) in enumerate(pairs) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {a!r:.60} != {b!r:.60}"]


def _of_tensors(a: torch.Tensor, b: torch.Tensor, where: str) -> list[str]:
    a, b = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape:
        return [f"{where}: {a.dtype} {tuple(a.shape)} is not {b.dtype} {tuple(b.shape)}"]
    if bool(((a == b) | ((a != a) & (b != b))).all()):
        return []
    return [f"{where} by at most {float((a.double() - b.double()).abs().max()):.2g}"]
