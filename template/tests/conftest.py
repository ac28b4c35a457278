import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import train

ROOT = Path(__file__).resolve().parents[2]
collect_ignore = ["owner"]  # files of a project, for test_owner.py
ANSWERS = {"name": "striped-horses", "package": "zebra_study_2", "author": "Zoë O'Hara"}
ANSWERS["description"] = 'Stripes, "measured"'
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


def make(folder: Path, *flags: str) -> Path:
    """Make a project without copier."""
    answers = [f"--{key}={value}" for key, value in ANSWERS.items()]
    succeed(ROOT, "python", "template/make_project.py", folder, *flags, *answers)
    return folder


def tracked(folder: Path) -> dict[str, bytes]:
    """Return what each file that git tracks holds."""
    paths = succeed(folder, "git", "ls-files").splitlines()
    return {path: (folder / path).read_bytes() for path in paths if (folder / path).is_file()}


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of this project."""
    output = tmp_path_factory.mktemp("outputs")
    words = ("trainer.max_epochs=2", "data=synthetic", "model=mlp", f"output_dir={output}")
    with contextlib.chdir(ROOT):
        train(*words)  # in this process, which has imported what it needs
    return next((output / "default").iterdir())


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the examples, to look at."""
    return make(tmp_path_factory.mktemp("project") / "zebra-study")


@pytest.fixture(scope="session")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project without the examples, to look at."""
    return make(tmp_path_factory.mktemp("skeleton") / "zebra-study", "--examples=")
