"""The installed packages against those that the project is tested with."""

import platform
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from harness.doctor.section import Problem, Section

SHOWN = ("torch", "pytorch-lightning", "hydra-core")


def versions(root: Path) -> Section:
    """What is installed of what the project needs.

    Args:
        root: the folder of pyproject.toml, which has the bounds, and of requirements.lock, which
            has the versions that all tests have passed with.
    """
    tested = locked(root / "requirements.lock")
    section = Section("versions", "", {})
    lines = [f"Python {platform.python_version()}"]
    for requirement in bounds(root / "pyproject.toml"):
        name, version = requirement.name, _installed(requirement.name)
        is_within = version is not None and requirement.specifier.contains(
            version, prereleases=True
        )
        if name in SHOWN:
            lines.append(f"{name} {version} (tested: {tested.get(name)})")
        section.values[name] = {
            "installed": version,
            "tested": tested.get(name),
            "bounds": str(requirement.specifier),
        }
        if not is_within:
            section.problems.append(
                Problem(
                    f"{name} {version} is installed, and the project takes {requirement.specifier}"
                    if version
                    else f"{name} is not installed",
                    f'Install it: pip install "{requirement}"',
                )
            )
    section.text = "\n".join(lines)
    return section


def bounds(pyproject: Path) -> list[Requirement]:
    """The packages of ``dependencies = [...]``; Python 3.10 cannot read TOML by itself."""
    block = re.search(r"^dependencies = \[(.*?)^\]", pyproject.read_text(), re.S | re.M)
    assert block is not None
    return [Requirement(text) for text in re.findall(r'^\s*"([^"]+)"', block[1], re.M)]


def locked(lock: Path) -> dict[str, str]:
    """Exact versions by package."""
    pairs = (line.partition("==") for line in lock.read_text().splitlines())
    return {name: version for name, _, version in pairs}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
