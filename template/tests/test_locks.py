"""requirements.lock has a version for everything that the requirements ask for."""

import re

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from template.tests.conftest import ROOT

FILES = ("requirements.txt", "harness/requirements.txt", "harness/extras/test.txt")
REQUIRED = [
    line.partition("  #")[0]
    for file in FILES
    for line in (ROOT / file).read_text().splitlines()
    if line and not line.startswith("#")
]
LINES = (ROOT / "requirements.lock").read_text().splitlines()


def test_each_python_has_one_version_of_each_package() -> None:
    """Else: make lock."""
    constraints = [Requirement(line) for line in LINES]
    for minor in range(11, 15):
        here = {**default_environment(), "python_version": f"3.{minor}"}
        here["python_full_version"] = f"3.{minor}.0"
        used = [one for one in constraints if one.marker is None or one.marker.evaluate(here)]
        versions = {canonicalize_name(one.name): str(one.specifier) for one in used}
        assert len(versions) == len(used)
        for line in REQUIRED:
            wanted = Requirement(line)
            version = versions[canonicalize_name(wanted.name)]
            assert version.startswith("==")
            assert wanted.specifier.contains(version.removeprefix("==")), line


def test_lock_names_no_index_and_no_platform() -> None:
    """Every user's pip would otherwise use the index of the machine that made the lock."""
    assert not [
        line for line in LINES if re.search(r"://|^-|\+cpu|\+cu|^nvidia-[^m]|^triton", line)
    ]
