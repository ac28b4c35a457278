"""A release is one version, wherever it is written."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from template.tests.conftest import ROOT, succeed


def test_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())
    library = (ROOT / "harness" / "pyproject.toml").read_text()
    assert f'version = "{version}"' in library
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == "Unreleased"
    assert headings[1] == f"{version} ({citation['date-released']})"
    assert citation["version"] == version


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_and_source_distribution_train_alone(tmp_path: Path) -> None:
    """In a fresh environment, a project with no file of this repository but its own."""
    succeed(tmp_path, "python", "-m", "venv", "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "-q", "--no-compile")
    succeed(tmp_path, *pip, "build")
    succeed(tmp_path, python, "-m", "build", ROOT / "harness", "--outdir", tmp_path)
    project = tmp_path / "project"
    for name in ("conf", "src"):
        shutil.copytree(ROOT / "harness" / "tests" / "project" / name, project / name)
    train = (
        "env",
        "PYTHONPATH=src",
        python,
        "-m",
        "harness",
        "train",
        "trainer.max_epochs=1",
        "watch=none",
    )
    succeed(tmp_path, *pip, "-c", ROOT / "requirements.lock", *tmp_path.glob("*.whl"), timeout=1200)
    assert "test/accuracy" in succeed(project, *train)
    (source,) = tmp_path.glob("lightning_harness-*.tar.gz")
    succeed(tmp_path, *pip, "--force-reinstall", "--no-deps", source)
    assert "test/accuracy" in succeed(project, *train, "seed=2")
