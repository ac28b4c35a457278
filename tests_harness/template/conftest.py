import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import work_tree

from tests_harness.conftest import ROOT

IDENTITY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "A Tester"), ("EMAIL", "tester@example.org"))
}
# Nothing of this environment but what a program needs: not its packages, nor the settings of git.
ENVIRONMENT = IDENTITY | {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "HOME": os.environ.get("HOME", "/"),
    "GIT_CONFIG_GLOBAL": os.devnull,
    "OMP_NUM_THREADS": "1",
    **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
}


def run(
    folder: Path, *command: str | Path, timeout: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run a command; ``python`` is the one that runs the tests."""
    words = [sys.executable if word == "python" else str(word) for word in command]
    return subprocess.run(
        words,
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def succeed(folder: Path, *command: str | Path, timeout: float = 500) -> str:
    """Run a command that must succeed, and return what it prints."""
    result = run(folder, *command, timeout=timeout)
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def commit(folder: Path, message: str) -> None:
    """Commit all there is."""
    succeed(folder, "git", "add", "-A")
    succeed(folder, "git", "commit", "-q", "-m", message)


def tree(folder: Path) -> work_tree.Files:
    """The files of a folder, without those that git keeps or ignores."""
    return work_tree.read(folder)


@pytest.fixture
def clone(tmp_path: Path) -> Callable[[str], Path]:
    """Make clones of a repository whose only commit is the working tree."""

    def make(name: str = "clone") -> Path:
        folder = tmp_path / name
        work_tree.write(folder, {}, work_tree.read(ROOT))
        succeed(folder, "git", "init", "-q", "-b", "main")
        commit(folder, "The working tree")
        return folder

    return make
