"""A run notes its commit, and a diff with which git makes its code again."""

import subprocess
from pathlib import Path

import pytest

from harness import repository

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, in a folder of which commands are typed."""
    project = tmp_path / "project"
    (project / "notebooks").mkdir(parents=True)
    (project / "net.py").write_text("WIDTH = 1\n")
    (project / "mask.bin").write_bytes(bytes(range(256)))
    (project / ".gitignore").write_text("secret.py\n")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        subprocess.run([*GIT, *words], cwd=project, check=True)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.chdir(project / "notebooks")
    return project


def head(folder: Path) -> str:
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


def test_what_is_committed_is_noted_alone(project: Path, tmp_path: Path) -> None:
    (project / "data.csv").write_text("no source")
    noted = repository.note(tmp_path)
    assert noted == {"commit": head(project), "repository": str(project), "diff": None}
    assert not [*tmp_path.glob("*.diff")]


def test_a_diff_with_new_sources_makes_the_code_again(project: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "config", "diff.noprefix", "true"], cwd=project, check=True)
    subprocess.run(["git", "config", "color.diff", "always"], cwd=project, check=True)
    (project / "net.py").write_text("WIDTH = 2\n")
    (project / "mask.bin").write_bytes(bytes(reversed(range(256))))
    new = {"new*.py": "NEW = 1", "é.py": "WIDTH = 3\n", "empty.py": ""}
    for name, text in new.items():
        (project / name).write_text(text)
    (project / "secret.py").touch()
    (project / "new.csv").touch()
    index = (project / ".git" / "index").read_bytes()
    noted = repository.note(tmp_path)
    assert (project / ".git" / "index").read_bytes() == index
    again = tmp_path / "again"
    subprocess.run(["git", "clone", "-q", project, again], check=True)
    subprocess.run(["git", "apply", tmp_path / noted["diff"]], cwd=again, check=True)
    for name in (*new, "net.py", "mask.bin"):
        assert (again / name).read_bytes() == (project / name).read_bytes()
    assert not (again / "secret.py").exists()
    assert not (again / "new.csv").exists()
    assert repository.note(tmp_path) == noted
    assert len([*tmp_path.glob("*.diff")]) == 1  # starts with equal changes share it


def test_what_cannot_be_kept_is_said(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "net.py").write_text("WIDTH = 2\n")
    assert repository.note(project / "net.py")["no_diff"] == "File exists"
    monkeypatch.setattr(repository, "MOST_DIFF_BYTES", 10)
    noted = repository.note(tmp_path)
    assert noted["diff"] is None
    assert noted["no_diff"].startswith("it is larger than ")
    monkeypatch.chdir(tmp_path)
    assert repository.note(tmp_path) == {"commit": None}  # no repository
    monkeypatch.setenv("PATH", "")
    assert repository.note(tmp_path) == {"commit": None}  # no git
