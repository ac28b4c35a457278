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
