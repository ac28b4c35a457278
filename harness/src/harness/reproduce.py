"""``runs.py reproduce``: train a run again with its commit, diff and config, and compare."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness import code_version, frozen_files, record
from harness.command import run_folder
from harness.data.checksum import checksum
from harness.errors import UserError
from harness.names import few
from harness.processes import launch
from harness.repository import git
from harness.runs.equality import differences, reached
from harness.runs.reading import CONFIG, RunFiles

FACTS = ("data", "processor", "gpus", "cpu_capability", "num_threads", "strategy", "num_devices")


def reproduce(run: RunFiles, output: Path) -> bool:
    """Make a run again in a new folder, and print whether it has come to the same, by bit."""
    start = (run.record.get("starts") or [{}])[-1]
    place = Path(start.get("started_in", "."))  # where relative paths of data begin
    place = place if place.is_dir() else Path.cwd()
    if missing := [*_missing(run, start, place)]:
        raise UserError("\n  ".join([f"{run.folder} cannot be made again.", *missing]))
    top = start["repository"] if Path(start["repository"]).is_dir() else "."
    said = git("log", "-1", "--format=%h by %an, %as: %s", start["commit"], folder=top)
    changes = f"and {start['diff']}" if start["diff"] else "with no changes"
    print(f"With your rights it runs the code of {said.decode().strip()}, {changes}.", flush=True)
    for line in code_version.versions(start["code"]["packages"], code_version.packages()):
        print(f"differs: {line}", flush=True)
    try:
        output.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{output} cannot be made: {error.strerror}. Use --output.") from error
    program, run_dir = _check_out(run, start, top, output.resolve() / "code"), output / "run"
    frozen: Any = OmegaConf.create(frozen_files.read_yaml(run.folder / CONFIG))
    loggers = {k: node for k, node in (frozen.logger or {}).items() if "Table" in str(node)}
    frozen.update(resume=None, run_dir=str(run_dir.resolve()), logger=loggers)
    run_dir.mkdir()
    run_folder.save_words(run_folder.load_words(run.folder), run_dir)
    run_folder.save_config(frozen, run_dir)
    inherited = launch.job_environment(run_dir.resolve())
    paths = program.parent / "src", program.parent, inherited.get("PYTHONPATH", "")
    environment = {k: v for k, v in inherited.items() if not record.ROUNDING.fullmatch(k)}
    environment |= {k: v for k, v in start["environment"].items() if record.ROUNDING.fullmatch(k)}
    environment |= {"OMP_NUM_THREADS": str(start["num_threads"])}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    if status := subprocess.call([sys.executable, program], cwd=place, env=environment):
        raise UserError(f"It ended with exit status {status}; {run_dir / 'run.log'} says why.")
    one, two = ({**r["starts"][-1], **r} for r in (run.record, record.read(run_dir)))
    for line in [x for name in FACTS for x in differences(one.get(name), two.get(name), name)]:
        print(f"differs: {line}")
    before, again = reached(run.folder), reached(run_dir)
    for name in before:
        found = differences(before[name], again[name], name)
        print(f"{name}: " + (f"NOT EQUAL: {few(found, 3)}" if found else "equal by bit"))
    is_equal = not differences(before, again)
    print(f"{output}: " + ("reproduced, equal by bit" if is_equal else "not reproduced"))
    return is_equal


def _missing(run: RunFiles, start: dict[str, Any], place: Path) -> Iterator[str]:
    """What the run lacks to be made again, each in a line."""
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
