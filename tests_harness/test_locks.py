"""uv and pip install the same versions, from where everybody can."""

import re
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests_harness.conftest import ROOT

tomllib = pytest.importorskip("tomllib")  # of Python 3.11
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES: list[dict[str, Any]] = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
(OURS,) = [package for package in PACKAGES if "editable" in package["source"]]
# What Makefile leaves to the platform.
PLATFORM = re.compile(r"nvidia-[^m]|cuda-|triton|setuptools")


def plain(requirement: Requirement) -> tuple[str, str, str]:
    return canonicalize_name(requirement.name), str(requirement.specifier), str(requirement.marker)


def needed(entries: list[dict[str, Any]]) -> set[str]:
    """The names of packages, and of all that these need, with their extras."""
    found: set[tuple[str, str]] = set()
    while entries:
        entry = entries.pop()
        for extra in ("", *entry.get("extra", ())):
            if (entry["name"], extra) in found:
                continue
            found.add((entry["name"], extra))
            for package in PACKAGES:
                if package["name"] == entry["name"]:
                    of_extra = package.get("optional-dependencies", {}).get(extra, ())
                    entries += package.get("dependencies", ()) if not extra else of_extra
    return {name for name, _ in found}


def test_uv_lock_is_that_of_pyproject() -> None:
    """Else: uv lock, or make lock."""
    assert OURS["name"] == canonicalize_name(PYPROJECT["name"])
    assert OURS["version"] == PYPROJECT["version"]
    wanted = {plain(Requirement(line)) for line in PYPROJECT["dependencies"]}
    for extra, lines in PYPROJECT["optional-dependencies"].items():
        wanted |= {plain(Requirement(f"{line}; extra == '{extra}'")) for line in lines}
    locked = set()
    for entry in OURS["metadata"]["requires-dist"]:
        marker = f"; {entry['marker']}" if "marker" in entry else ""
        locked.add(plain(Requirement(f"{entry['name']}{entry.get('specifier', '')}{marker}")))
    assert locked == wanted


def test_requirements_lock_says_what_uv_lock_says() -> None:
    """Else: make lock."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    constraints = [Requirement(line) for line in lines]
    versions: dict[str, set[str]] = {}
    for package in PACKAGES:
        versions.setdefault(package["name"], set()).add(package["version"])
    for constraint in constraints:
        (specifier,) = constraint.specifier
        assert specifier.operator == "=="
        assert specifier.version in versions[canonicalize_name(constraint.name)], constraint
    extra = OURS["optional-dependencies"]["test"]
    of_tests = needed([*OURS["dependencies"], *extra])
    named = {canonicalize_name(constraint.name) for constraint in constraints}
    assert named <= of_tests
    left_out = {name for name in of_tests - named if not PLATFORM.match(name)}
    # What only a browser's or Windows' Python needs.
    assert left_out <= {"httpx2-jsfetch"}


def test_uv_lock_names_the_public_index_alone() -> None:
    """An index of whoever made it would be asked by everybody."""
    sources = {package["source"].get("registry") for package in PACKAGES if package is not OURS}
    assert sources == {"https://pypi.org/simple"}
    hosts = set(re.findall(r'url = "(https?://[^/"]+)', (ROOT / "uv.lock").read_text()))
    assert hosts == {"https://files.pythonhosted.org"}
