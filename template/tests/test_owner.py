"""`make test` in a project accepts the ordinary code of its user: see `owner/`."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from template.tests.conftest import ROOT, commit, make, succeed

OWNER = Path(__file__).parent / "owner"
PYTHON = f"PYTHON={sys.executable}"


def environment_beside(project: Path) -> None:
    """Make an environment that has the project, and its dependencies from this environment."""
    folder = project / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file brings packages, and not what is installed there as editable: not us.
    folders = [
        project / "src",
        project / "harness" / "src",
        *(path for path in sys.path if path.endswith("site-packages")),
    ]
    (site / "project.pth").write_text("".join(f"{path}\n" for path in folders))
    (folder / "bin" / "ruff").symlink_to(Path(sys.executable).with_name("ruff"))
    for tool in ("mypy", "pytest"):
        command = folder / "bin" / tool
        command.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {tool} "$@"\n')
        command.chmod(0o755)
    for stamp in ("made", "installed", "installed-test"):
        (folder / stamp).touch()


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """A project with a user's files, and an environment beside this one."""
    project = make(tmp_path / "zebra-study", "--examples=")
    shutil.copytree(OWNER, project, dirs_exist_ok=True)
    commit(project, "Mine")
    environment_beside(project)
    return project


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_an_ordinary_owner_s_code_passes_make_test(owned: Path) -> None:
    assert "test_houses.py" in succeed(owned, "make", "test", timeout=1200)
    assert succeed(owned, "git", "status", "--porcelain") == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["vendored", "package"])
def test_project_works_in_an_environment_of_its_own(tmp_path: Path, kind: str) -> None:
    """All packages come from pip, or its cache: what the project needs, it says."""
    head = succeed(ROOT, "git", "rev-parse", "HEAD").strip()  # pip takes what is committed
    library = f"--library=file://localhost{ROOT}@{head}" if kind == "package" else "--library="
    project, started = make(tmp_path / "zebra-study", library), time.monotonic()
    succeed(project, "make", "train", PYTHON, "ARGS=trainer.max_epochs=1", timeout=1200)
    installed = time.monotonic()
    succeed(project, "make", "test", PYTHON, timeout=1200)
    shutil.rmtree(project / ".venv")
    print(f"{kind}: installed and trained in {installed - started:.0f} s,", end=" ")
    print(f"checked and tested in {time.monotonic() - installed:.0f} s")
