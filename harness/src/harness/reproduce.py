"""Train a run again with its commit, diff and config, and compare both: ``runs.py reproduce``.

In: a finished run. Out: whether the new run is bit-identical, and a line with the differences.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from harness import provenance
from harness.checkpoints.lookup import verified
from harness.checkpoints.reading import read_weights
from harness.command import run_folder
from harness.display import join_first
from harness.distributed import parent_process
from harness.errors import UserError, print_text
from harness.files import REPRODUCED, refuse_links
from harness.provenance import git
from harness.runs import reading

TIMINGS = re.compile(": (throughput|gpu)/")  # columns that differ in every run


def reproduce(run: Path, output: Path | None) -> bool:
    """Train a run again in a new folder. Print and return whether both runs are bit-identical.

    Raises:
        UserError: the run lacks a file, its commit or its diff, or the new run fails.
    """
    refuse_links(run)
    output = (output or run / REPRODUCED / time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    starts = provenance.read(run).get("starts") or [{}]
    start = starts[-1]
    if missing := _missing(run, starts):
        raise UserError(f"{run} cannot be reproduced: {missing}")
    run_folder.load_config(run)  # raises for a damaged config, before a folder is made
    top = Path(os.fsdecode(git("rev-parse", "--show-toplevel")).rstrip("\n"))
    commit = git("log", "-1", "--format=%h by %an, %as: %s", start["commit"], "--", folder=top)
    changes = f" and {start['diff']}" if start.get("diff") else ""
    author_and_title = commit.decode(errors="replace").strip()
    print_text(
        f"This command runs, with your permissions, the code of {author_and_title}{changes}."
    )
    code = output / "code"
    git("clone", "--quiet", "--shared", "--no-checkout", ".", str(code), folder=top, seconds=None)
    git("checkout", "--quiet", "--detach", start["commit"], "--", folder=code, seconds=None)
    if changes:
        diff = (run / start["diff"]).resolve()
        git("apply", "--whitespace=nowarn", "--", str(diff), folder=code, seconds=None)
    project = _project_folder(start)
    _train(run, start, code / project, top / project, output / "run")
    before, after = results_of(run), results_of(output / "run")
    differing = [name for name in before | after if before.get(name) != after.get(name)]
    verdict = f"NOT EQUAL: {join_first(differing)}" if differing else "reproduced, bit-identical"
    print_text(f"{output}: {verdict}")
    return not differing


def _missing(run: Path, starts: list[dict[str, Any]]) -> str | None:
    """Return why a run cannot be reproduced, or ``None``."""
    if (status := reading.read(run)["status"]) != "finished":
        return f"it is {status}. Let it finish with: python train.py resume={run}"
    if not starts[-1].get("commit") or "packages" not in starts[-1]:
        return "it was trained outside of a git repository, or with version 0.3 or before."
    if "no_diff" in starts[-1]:
        return f"its uncommitted changes were not saved: {starts[-1]['no_diff']}."
    if not _is_valid(starts[-1]):
        return "its record.json was changed by hand or is damaged. Restore it from a copy."
    if len({(start.get("commit"), start.get("diff")) for start in starts}) > 1:
        return f"its code changed while it was stopped, between its {len(starts)} starts."
    return None


def _is_valid(start: dict[str, Any]) -> bool:
    """Return whether a start names a commit, a diff in its folder, and a folder of the repository.

    Other values could pass options to git, or run code from outside of the commit.
    """
    commit, diff, num = start["commit"], start.get("diff"), start.get("num_threads")
    return (
        re.fullmatch("[0-9a-f]{40,64}", str(commit)) is not None
        and (diff is None or re.fullmatch(r"uncommitted_[0-9a-f]{8}\.diff", str(diff)) is not None)
        and isinstance(num, int)
        and os.pardir not in Path(_project_folder(start)).parts
    )


def _project_folder(start: dict[str, Any]) -> str:
    """Return the folder in which a run was started, relative to its repository."""
    return os.path.relpath(str(start.get("started_in")), str(start.get("repository")))


def _train(
    run: Path, start: dict[str, Any], project: Path, working_dir: Path, run_dir: Path
) -> None:
    """Train with the run's config and number of threads.

    Args:
        run: the folder of the run to reproduce.
        start: its last start.
        project: the folder with its code.
        working_dir: the working directory of the training, for relative paths of data.
        run_dir: the new run's folder.
    """
    frozen: Any = run_folder.load_config(run)
    loggers = {k: node for k, node in (frozen.logger or {}).items() if "Table" in str(node)}
    frozen.update(resume=None, run_dir=str(run_dir), logger=loggers)
    run_dir.mkdir()
    run_folder.save_overrides(run_folder.load_overrides(run), run_dir)
    run_folder.save_config(frozen, run_dir)
    environment = dict(parent_process.job_environment(run_dir))
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = project / "src", project, *filter(None, known)  # "" would be the working directory
    environment["OMP_NUM_THREADS"] = str(start["num_threads"])
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    command = [sys.executable, str(project / "train.py")]
    cwd = working_dir if working_dir.is_dir() else Path()
    if status := subprocess.call(command, cwd=cwd, env=environment):
        raise UserError(
            f"The new run ended with exit status {status}. Read the reason in {run_dir}/run.log."
        )


def results_of(folder: Path) -> dict[str, Any]:
    """Return a run's metrics, results and weights, each by its file and name."""
    table, results = reading.read_table(folder / "metrics.csv"), reading.read(folder)["metrics"]
    values: dict[str, Any]  # numbers as text: a NaN equals a NaN
    values = {f"metrics.csv: {column.name}": repr([*column]) for column in table}
    values |= {f"results.json: {name}": repr(value) for name, value in results.items()}
    values = {name: v for name, v in values.items() if not TIMINGS.search(name)}
    for path in (folder / "checkpoints").glob("[bl]*st.ckpt"):  # best and last
        for name, value in read_weights(verified(path)).items():
            parts: list[Any] = [repr(value)]
            if isinstance(value, torch.Tensor):
                data = value.to_dense().reshape(-1).view(torch.uint8).numpy().tobytes()
                parts = [value.dtype, value.shape, data]
            values[f"{path.name}: {name}"] = parts
    return values
