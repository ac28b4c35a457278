"""Train a run again with its commit, diff and config, and compare by bit: ``runs.py reproduce``.

In: a finished run. Out: a line on what differs, and whether all is equal by bit.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harness import record
from harness.checkpoints.lookup import verified
from harness.checkpoints.reading import read_weights
from harness.command import run_folder
from harness.errors import UserError, print_text
from harness.files import REPRODUCED, refuse_links
from harness.names import few
from harness.processes import parent
from harness.record import git
from harness.runs import reading

TIMES = re.compile(": (throughput|gpu)/")  # values that no two runs have in common


def reproduce(run: Path, output: Path | None) -> bool:
    """Train a run again in a new folder, and print whether it has come to the same, by bit."""
    refuse_links(run)
    output = (output or run / REPRODUCED / time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    starts = record.read(run).get("starts") or [{}]
    start = starts[-1]
    if missing := _missing(run, starts):
        raise UserError(f"{run} cannot be made again: {missing}")
    run_folder.load_config(run)  # raises if it was damaged, before anything is written
    top = Path(os.fsdecode(git("rev-parse", "--show-toplevel")).rstrip("\n"))
    commit = git("log", "-1", "--format=%h by %an, %as: %s", start["commit"], "--", folder=top)
    changes = f" and {start['diff']}" if start.get("diff") else ""
    code_is = commit.decode(errors="replace").strip()
    print_text(f"With your rights it runs the code of {code_is}{changes}.")
    code = output / "code"
    git("clone", "--quiet", "--shared", "--no-checkout", ".", str(code), folder=top, seconds=None)
    git("checkout", "--quiet", "--detach", start["commit"], "--", folder=code, seconds=None)
    if changes:
        diff = (run / start["diff"]).resolve()
        git("apply", "--whitespace=nowarn", "--", str(diff), folder=code, seconds=None)
    below = _below(start)
    _train(run, start, code / below, top / below, output / "run")
    before, after = reached(run), reached(output / "run")
    differ = [name for name in before | after if before.get(name) != after.get(name)]
    verdict = f"NOT EQUAL: {few(differ)}" if differ else "reproduced, equal by bit"
    print_text(f"{output}: {verdict}")
    return not differ


def _missing(run: Path, starts: list[dict[str, Any]]) -> str | None:
    """Say what the run lacks to be made again."""
    if (status := reading.read(run)["status"]) != "finished":
        return f"it is {status}. Let it finish with resume={run}"
    if not starts[-1].get("commit") or "packages" not in starts[-1]:
        return "it was trained outside of a git repository, or with version 0.3 or before."
    if "no_diff" in starts[-1]:
        return f"what was not committed was not kept: {starts[-1]['no_diff']}."
    if not _is_plain(starts[-1]):
        return "its record.json does not hold what a run writes there. Bring it back from a copy."
    if len({(start.get("commit"), start.get("diff")) for start in starts}) > 1:
        return f"its code changed while it was stopped, between its {len(starts)} starts."
    return None


def _is_plain(start: dict[str, Any]) -> bool:
    """Return whether a start names a commit, a diff beside it, and a folder of the repository.

    Anything else could be an option of git, or lead to code that is not the commit's.
    """
    commit, diff, num = start["commit"], start.get("diff"), start.get("num_threads")
    return (
        re.fullmatch("[0-9a-f]{40,64}", str(commit)) is not None
        and (diff is None or re.fullmatch(r"uncommitted_[0-9a-f]{8}\.diff", str(diff)) is not None)
        and isinstance(num, int)
        and os.pardir not in Path(_below(start)).parts
    )


def _below(start: dict[str, Any]) -> str:
    """Return the folder in which a run was started, relative to that of its repository."""
    return os.path.relpath(str(start.get("started_in")), str(start.get("repository")))


def _train(run: Path, start: dict[str, Any], project: Path, place: Path, run_dir: Path) -> None:
    """Train with the run's config, and with as many threads, where relative paths of data begin."""
    frozen: Any = run_folder.load_config(run)
    loggers = {k: node for k, node in (frozen.logger or {}).items() if "Table" in str(node)}
    frozen.update(resume=None, run_dir=str(run_dir), logger=loggers)
    run_dir.mkdir()
    run_folder.save_words(run_folder.load_words(run), run_dir)
    run_folder.save_config(frozen, run_dir)
    environment = dict(parent.job_environment(run_dir))
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = project / "src", project, *filter(None, known)  # "" would be the folder it is run in
    environment["OMP_NUM_THREADS"] = str(start["num_threads"])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, str(project / "train.py")]
    if status := subprocess.call(command, cwd=place if place.is_dir() else ".", env=environment):
        raise UserError(f"It ended with exit status {status}; {run_dir / 'run.log'} says why.")


def reached(folder: Path) -> dict[str, Any]:
    """Collect what runs are compared by, by its place: metrics, results and weights."""
    table, results = reading.read_table(folder / "metrics.csv"), reading.read(folder)["metrics"]
    values: dict[str, Any]  # of numbers the text, in which a NaN equals a NaN
    values = {f"metrics.csv: {column.name}": repr([*column]) for column in table}
    values |= {f"results.json: {name}": repr(value) for name, value in results.items()}
    values = {name: v for name, v in values.items() if not TIMES.search(name)}
    for path in (folder / "checkpoints").glob("[bl]*st.ckpt"):  # best and last
        for name, value in read_weights(verified(path)).items():
            parts: list[Any] = [repr(value)]
            if isinstance(value, torch.Tensor):
                data = value.to_dense().reshape(-1).view(torch.uint8).numpy().tobytes()
                parts = [value.dtype, value.shape, data]
            values[f"{path.name}: {name}"] = parts
    return values
