"""`make test` in a project accepts the ordinary code of its owner: see owner/."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from template.make_project import PACKAGE
from tests_harness.template.conftest import commit, make, run, succeed

OWNER = Path(__file__).parent / "owner"


def environment_beside(project: Path) -> None:
    """Make an environment that has the project, and its dependencies from this environment."""
    folder = project / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file brings packages, and not what is installed there as editable: not us.
    folders = [project / "src", *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "project.pth").write_text("".join(f"{path}\n" for path in folders))
    (folder / "bin" / "ruff").symlink_to(Path(sys.executable).with_name("ruff"))
    for tool in ("mypy", "pytest"):
        command = folder / "bin" / tool
        command.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {tool} "$@"\n')
        command.chmod(0o755)
    for stamp in ("made", "installed", "installed-test"):
        (folder / stamp).touch()


def check_and_train(project: Path) -> str:
    """Run a project's checks and tests as its owner would, and an epoch of training."""
    python = project / ".venv" / "bin" / "python"
    missing = run(project, python, "-c", f"import {PACKAGE}")
    assert "ModuleNotFoundError" in missing.stderr
    tested = succeed(project, "make", "test", timeout=900)
    trained = succeed(project, python, "train.py", "trainer.max_epochs=1", timeout=500)
    assert "test/accuracy" in trained
    assert succeed(project, "git", "status", "--porcelain") == ""
    return tested


@pytest.mark.timeout(1500)
def test_an_ordinary_owner_s_code_is_accepted(tmp_path: Path) -> None:
    """Also where Slurm is installed, of which Lightning warns in every run."""
    project = make(tmp_path / "zebra-study", "--no-examples")
    shutil.copytree(OWNER, project, dirs_exist_ok=True)
    commit(project, "Mine")
    environment_beside(project)
    srun = project / ".venv" / "bin" / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    python = project / ".venv" / "bin" / "python"
    path = f"PATH={srun.parent}:/usr/bin:/bin"
    trained = succeed(project, "env", path, python, "train.py", "debug=fast_dev_run")
    assert "srun" not in trained
    tested = succeed(project, "env", path, "make", "test", timeout=900)
    assert "test_houses.py" not in tested.partition("warnings summary")[0]  # nothing failed
    assert " passed" in tested
