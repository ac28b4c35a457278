import re
from importlib import metadata
from pathlib import Path

import pytest

from harness.doctor import machine as this
from tests_harness.conftest import ROOT


def test_bounds_and_tested_versions_are_those_of_the_repository() -> None:
    requirements = {each.name: each for each in this.bounds(ROOT / "pyproject.toml")}
    assert {"torch", "pytorch-lightning", "hydra-core", "rich"} <= requirements.keys()
    assert "pytest" not in requirements
    assert "2.6" in str(requirements["torch"].specifier)
    tested = this.locked(ROOT / "requirements.lock")
    for name, requirement in requirements.items():
        assert requirement.specifier.contains(tested[name]), name


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pyproject.toml").write_text(
        'dependencies = [\n  "torch>=2.6,<2.14",\n  "rich>=13",  # why\n]\n'
        '[optional]\nmore = [\n  "other>1",\n]\n'
    )
    (tmp_path / "requirements.lock").write_text("torch==2.13.0\nrich==15.0.0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.13.0+cpu", ""),
        ("2.6.0", ""),
        ("2.13.1", ""),
        ("2.14.0", "torch 2.14.0 is installed, and the project takes <2.14,>=2.6"),
        ("2.14.0.dev20260101+cpu", "torch 2.14.0.dev20260101+cpu is installed"),
        ("2.5.1+cu121", "torch 2.5.1+cu121 is installed"),
        (None, "torch is not installed"),
    ],
)
def test_version_is_held_against_the_bounds(
    torch: str | None, said: str, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "torch" and torch is None:
            raise metadata.PackageNotFoundError
        return torch if name == "torch" else "14.0"

    monkeypatch.setattr(metadata, "version", version)
    section = this.versions(repo)
    assert f"torch {torch} (tested: 2.13.0)" in section.text
    assert section.values["rich"] == {"installed": "14.0", "tested": "15.0.0", "bounds": ">=13"}
    assert len(section.problems) == bool(said)
    for problem in section.problems:
        assert said in problem.what
        assert re.search(r'pip install "torch<2.14,>=2.6"', problem.remedy)
