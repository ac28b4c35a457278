"""A run notes its commit, and a diff with which git makes its code again; changes are shown."""

import subprocess
from pathlib import Path
from types import SimpleNamespace as Stub

import pytest
import torch

from harness import provenance

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


def start_of(run_dir: Path) -> dict[str, object]:
    """Begin a run, and return what it notes of its start."""
    provenance.begin(run_dir)
    strategy = Stub(root_device=torch.device("cpu"))
    trainer = Stub(is_global_zero=True, strategy=strategy, world_size=1, num_devices=1)
    provenance.note_training(run_dir, trainer)
    start: dict[str, object] = provenance.read(run_dir)["starts"][-1]
    return start


def test_a_diff_with_new_sources_makes_the_code_again(project: Path, tmp_path: Path) -> None:
    assert start_of(tmp_path)["diff"] is None
    subprocess.run(["git", "config", "diff.noprefix", "true"], cwd=project, check=True)
    subprocess.run(["git", "config", "color.diff", "always"], cwd=project, check=True)
    (project / "net.py").write_text("WIDTH = 2\n")
    (project / "mask.bin").write_bytes(bytes(reversed(range(256))))
    new = {"new*.py": "NEW = 1", "é.py": "WIDTH = 3\n", "notebooks/empty.py": ""}
    for name, text in new.items():
        (project / name).write_text(text)
    (project / "secret.py").touch()
    (project / "new.csv").touch()
    index = (project / ".git" / "index").read_bytes()
    start = start_of(tmp_path)
    assert (project / ".git" / "index").read_bytes() == index
    again = tmp_path / "again"
    subprocess.run(["git", "clone", "-q", project, again], check=True)
    subprocess.run(["git", "apply", tmp_path / str(start["diff"])], cwd=again, check=True)
    for name in (*new, "net.py", "mask.bin"):
        assert (again / name).read_bytes() == (project / name).read_bytes()
    assert not (again / "secret.py").exists()
    assert not (again / "new.csv").exists()
    assert start_of(tmp_path)["diff"] == start["diff"]
    assert len([*tmp_path.glob("*.diff")]) == 1  # starts with equal changes share it


def test_changes_of_the_code_are_shown(project: Path, tmp_path: Path) -> None:
    first = start_of(tmp_path)
    (project / "data.csv").write_text("no source")
    assert provenance.changes(tmp_path) is None
    (project / "net.py").write_text("WIDTH = 2\n")
    assert "uncommitted changes (then none)." in str(provenance.changes(tmp_path))
    subprocess.run([*GIT, "commit", "-qam", "second"], cwd=project, check=True)
    assert f"commit {first['commit']} -> " in str(provenance.changes(tmp_path))


def test_a_diff_that_cannot_be_kept_is_named_and_no_repository_is_none(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "net.py").write_text("WIDTH = 2\n")
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 10)
    start = start_of(tmp_path)
    assert start["diff"] is None
    assert str(start["no_diff"]).startswith("it is larger than ")
    monkeypatch.chdir(tmp_path)
    assert provenance.code() == ({"commit": None}, b"")
