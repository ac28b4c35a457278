"""A copy of the project, with a repository of its own, whose code a test may change."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests_harness.conftest import ROOT

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
QUIET = ("trainer.enable_progress_bar=false", "strategy=cpu")


@dataclass
class Project:
    """Where commands are typed."""

    folder: Path

    @classmethod
    def copied(cls, folder: Path) -> "Project":
        """Copy what a command needs, and commit it."""
        for name in ("src", "conf", "scripts"):
            shutil.copytree(
                ROOT / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        for name in ("train.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)
        (folder / ".gitignore").write_text("outputs/\n__pycache__/\n.cache/\n*.csv\n")
        project = cls(folder)
        for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
            project.git(*words)
        return project

    @property
    def environment(self) -> dict[str, str]:
        """Of its commands; its packages come before those that are installed."""
        return os.environ | {"PYTHONPATH": f"{self.folder / 'src'}{os.pathsep}{ROOT}"}

    def git(self, *words: str) -> None:
        subprocess.run([*GIT, *words], cwd=self.folder, check=True, capture_output=True)

    def run(self, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Type a command in its folder, or in another one."""
        return subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def train(self, name: str, *words: str) -> Path:
        """Train, and return the run's folder."""
        result = self.run("train.py", *QUIET, *words, f"name={name}")
        assert result.returncode == 0, result.stdout + result.stderr
        (run_dir,) = (self.folder / "outputs" / name).iterdir()
        return run_dir

    def reproduce(
        self, *words: object, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Make a run again."""
        return self.run(self.folder / "scripts" / "runs.py", "reproduce", *words, cwd=cwd)

    def source(self, name: str) -> Path:
        """A file of the owner's package, whatever that is called."""
        (path,) = (self.folder / "src").glob(f"*/{name}")
        return path

    def append(self, name: str, line: str) -> None:
        """Change a file of the owner's package."""
        path = self.source(name)
        path.write_text(f"{path.read_text()}\n{line}\n")
