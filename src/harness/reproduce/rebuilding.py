"""A run's code, packages and command in a folder of their own."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness import allowed, frozen_files, record
from harness.code_version import CodeVersion
from harness.errors import UserError
from harness.processes import launch
from harness.run.provenance import PACKAGES
from harness.runs.reading import CONFIG, RunFiles

CODE, RUN, ENVIRONMENT = "code", "run", "environment"
START = "start.py"
TRACKERS = re.compile(r"pytorch_lightning\.loggers\.(WandbLogger|MLFlowLogger)")
ARCHIVE_SECONDS = 300  # of a large repository
NOT_IMPORTED = "files that were read and not imported may be missing"
PROGRAM = '''"""Made by `runs.py reproduce`: trains the run that its environment names."""

from harness import main

if __name__ == "__main__":
    main("train", conf="conf")
'''


def write_code(code: CodeVersion, start: dict[str, Any], run: Path, folder: Path) -> list[str]:
    """Write the sources that a run has imported over what its commit and its diff have.

    The sources suffice. The commit adds what was read without being imported, such as a table
    beside a module, where a repository that has it is at hand.

    Args:
        code: kept with the run.
        start: the run's latest.
        run: the run's folder, which may have a diff.
        folder: to write to.

    Returns:
        What could not be written, each in a line.
    """
    folder.mkdir(parents=True)
    lines = list(_check_out(code.commit, start, run, folder)) if code.commit else []
    for name, content in code.sources.items():
        package, is_inside, _ = name.partition("/")
        in_src = (folder / "src" / package).is_dir() or not (folder / package).is_dir()
        path = (folder / "src" if is_inside and in_src else folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / START).write_text(PROGRAM)
    return lines


def _check_out(commit: str, start: dict[str, Any], run: Path, folder: Path) -> list[str]:
    """Write a commit's files, and what was changed of them."""
    archive = folder.with_name("commit.zip")
    for place in (start.get("started_in", ""), os.getcwd()):
        top = record.git("-C", str(place), "rev-parse", "--show-toplevel")
        words = ["archive", "--format=zip", f"--output={archive}", commit]
        found = top and record.git("-C", top.decode().strip(), *words, seconds=ARCHIVE_SECONDS)
        if found is not None:
            break
    else:
        archive.unlink(missing_ok=True)
        return [f"commit {commit[:10]}, which no repository here has: {NOT_IMPORTED}"]
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    archive.unlink()
    if not start.get("is_dirty"):
        return []
    diff = run / record.DIFF
    if not diff.is_file():
        return [f"{record.DIFF}, which is not kept where it is large: {NOT_IMPORTED}"]
    # The folder may be inside of another repository, whose paths git would take.
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent.resolve())}
    words = ["git", "apply", "--whitespace=nowarn", str(diff.resolve())]
    done = subprocess.run(words, cwd=folder, env=alone, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return [f"{record.DIFF}, which does not apply ({said}): {NOT_IMPORTED}"]
    return []


def make_environment(run: Path, folder: Path) -> Path:
    """Make a virtual environment with a run's packages, and return its Python.

    Raises:
        UserError: if pip cannot install them.
    """
    packages, python = run / PACKAGES, folder / "bin" / "python"
    commands = (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--no-deps", "-r", str(packages)],
    )
    for words in commands:
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["no word"]
            errors = [line for line in said if line.startswith("ERROR")] or said
            raise UserError(
                f"{packages} cannot be installed: {errors[-1]}\n"
                "pip takes another index from PIP_EXTRA_INDEX_URL; without --environment the "
                "present packages are used."
            )
    return python


def frozen_config(run: RunFiles) -> Any:
    """The config of a run, as one that begins anew.

    Raises:
        UserError: if it was damaged or edited.
    """
    # Names stay as they were, whatever they are today: the code is that of then.
    frozen: Any = OmegaConf.create(frozen_files.read_yaml(run.folder / CONFIG))
    frozen.resume = None
    for name, logger in (frozen.get("logger") or {}).items():
        if logger and TRACKERS.fullmatch(str(logger.get("_target_"))):  # it has the first run
            frozen.logger[name] = None
    return frozen


def command(python: Path | str, code: Path, run_dir: Path, start: dict[str, Any]) -> dict[str, Any]:
    """What ``subprocess.Popen`` takes to train a run with kept code."""
    inherited = launch.job_environment(run_dir)
    kept = {name: text for name, text in inherited.items() if not record.ROUNDING.fullmatch(name)}
    if "environment" not in start:  # an older version has not noted it
        kept = inherited
    if start.get("num_threads"):
        kept["OMP_NUM_THREADS"] = str(start["num_threads"])
    kept |= start.get("environment", {})
    # Of whoever makes it again: rules are not imported, so that kept code may lack them.
    kept[allowed.VARIABLE] = ",".join(allowed.own_names())
    first = [str(code / "src"), str(code)]
    others = inherited.get("PYTHONPATH", "").split(os.pathsep)
    kept["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, others)])
    return {"args": [str(python), str(code / START)], "env": kept}
