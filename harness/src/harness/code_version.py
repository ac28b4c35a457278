"""The sources and packages that a run computes with: checksums and versions. No torch."""

import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import record
from harness.names import few
from harness.places import HARNESS, is_owners

ALWAYS = ("torch", "pytorch_lightning", "torchmetrics", "numpy")
LIBRARIES = re.compile(f"(?:site|dist)-packages|{re.escape(sysconfig.get_path('stdlib'))}")
NUM_SHOWN = 6  # files and versions of one message


def running() -> dict[str, dict[str, Any]]:
    """``sources``: checksums by file; ``packages``: versions by name."""
    return {"sources": sources(), "packages": packages()}


def sources() -> dict[str, int]:
    """Checksums of the owner's imported modules, wherever they lie, and one of the harness.

    The harness counts whole: which of its modules are imported depends on the command.
    """
    checksums = {"harness": 0}
    for key, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or LIBRARIES.search(file):
            continue  # decided without the file system, as most of thousands are
        if key != "__mp_main__" and key.partition(".")[0] != "harness" and is_owners(file):
            path = Path(file)
            stem = path.stem if key == "__main__" else key.replace(".", "/")
            name = stem + ("/__init__" if path.stem == "__init__" else "") + path.suffix
            with suppress(OSError):  # deleted since
                checksums[name] = zlib.crc32(path.read_bytes())
    for path in sorted(HARNESS.rglob("*.py")):
        named = zlib.crc32(path.name.encode(), checksums["harness"])
        checksums["harness"] = zlib.crc32(path.read_bytes(), named)
    return checksums


def packages() -> dict[str, str]:
    """Versions of Python and of installed packages, by the names of their folders.

    To open the metadata of each would take a tenth of a second.
    """
    folders = [path for place in reversed(sys.path) for path in Path(place).glob("*-*.dist-info")]
    pairs = [folder.name.removesuffix(".dist-info").split("-", 1) for folder in folders]
    versions = {name.replace("_", "-").lower(): version for name, version in pairs}
    return {"Python": platform.python_version(), **dict(sorted(versions.items()))}


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of packages, by the names that are imported."""
    versions = {"Python": platform.python_version()}
    for name in sorted(set(names) - sys.stdlib_module_names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # installed by another name, or not at all
            if version := getattr(sys.modules.get(name), "__version__", None):
                versions[name] = str(version)
    return versions


def changes(run_dir: Path) -> str | None:
    """Say in what this process's code and packages differ from those of a run's last training.

    Returns:
        One line; ``None`` where nothing differs, or a dry run or version 0.3 has noted nothing.
    """
    starts = [start for start in record.read(run_dir).get("starts", []) if "code" in start]
    if not starts:
        return None
    before, now = starts[-1]["code"], running()
    today = now["sources"]  # without those that this command does not import
    changed = [name for name, crc in before["sources"].items() if today.get(name, crc) != crc]
    changed += versions(before["packages"], now["packages"])
    commit, diff = str(starts[-1].get("commit") or "")[:10], starts[-1].get("diff")
    by = f" by commit {commit}{f' and {diff}' if diff else ''}" if commit else ""
    told = f"The code has changed since the run was trained{by}: {few(changed, NUM_SHOWN)}."
    return told if changed else None


def versions(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Packages whose versions differ, the main ones first; builds, as "+cpu", do not count."""
    main = [name.replace("_", "-") for name in ("Python", *ALWAYS)]
    differing = [
        name
        for name, version in before.items()
        if now.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]
    differing.sort(key=lambda name: main.index(name) if name in main else len(main))
    return [f"{name} {before[name]} -> {now.get(name, 'not installed')}" for name in differing]
