"""A release is one version, wherever it is written."""

import re

import yaml

from template.tests.conftest import ROOT


def test_version_is_the_same_everywhere() -> None:
    (version,) = re.findall(r'(?m)^version = "(.*)"$', (ROOT / "pyproject.toml").read_text())
    library = (ROOT / "harness" / "pyproject.toml").read_text()
    assert f'version = "{version}"' in library
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == "Unreleased"
    assert headings[1] == f"{version} ({citation['date-released']})"
    assert citation["version"] == version


def test_agents_page_is_short_and_right() -> None:
    """It says of this repository, and under its own name of a project, where things are."""
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) < 60
    assert not [example for example in ("digits", "contrastive") if example in text]
    named = {
        name.rstrip("/") for name in re.findall(r"`((?:conf|src|harness|tests)[\w/.]*)`", text)
    }
    assert len(named) > 8
    assert [name for name in named if "mine" not in name and not (ROOT / name).exists()] == []
