import re
from importlib import metadata
from pathlib import Path

import pytest

from harness.doctor import machine as this
from tests_harness.conftest import ROOT


def test_bounds_are_those_of_the_repository() -> None:
    requirements = {each.name: each for each in this.bounds(ROOT / "pyproject.toml")}
    assert {"torch", "pytorch-lightning", "hydra-core", "rich"} <= requirements.keys()
    assert "pytest" not in requirements
    assert "2.6" in str(requirements["torch"].specifier)


@pytest.fixture
def pyproject(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(
        'dependencies = [\n  "torch>=2.6,<2.14",\n  "rich>=13",  # why\n]\n'
        '[optional]\nmore = [\n  "other>1",\n]\n'
    )
    return tmp_path / "pyproject.toml"


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("2.13.0+cpu", ""),
        ("2.6.0", ""),
        ("2.13.1", ""),
        ("2.14.0", "torch 2.14.0 is installed, and the project takes <2.14,>=2.6"),
        ("2.14.0.dev20260101+cpu", "torch 2.14.0.dev20260101+cpu is installed"),
        ("2.5.1+cu121", "torch 2.5.1+cu121 is installed"),
        (None, "torch none is installed"),
    ],
)
def test_version_is_held_against_the_bounds(
    torch: str | None, said: str, pyproject: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name == "torch" and torch is None:
            raise metadata.PackageNotFoundError
        return torch if name == "torch" else "14.0"

    monkeypatch.setattr(metadata, "version", version)
    section = this.versions(pyproject)
    assert f"torch {torch}" in section.text
    assert section.values["rich"] == {"installed": "14.0", "bounds": ">=13"}
    assert len(section.problems) == bool(said)
    for problem in section.problems:
        assert said in problem.what
        assert re.search(r'pip install "torch<2.14,>=2.6"', problem.remedy)
