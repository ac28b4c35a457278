"""The sources and packages that a run computes with: checksums and versions. No torch."""

import json
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
DISTRIBUTION = re.compile(r"(.+)-(.+)\.dist-info")
NUM_SHOWN = 6  # files and versions of one message


def running() -> dict[str, dict[str, Any]]:
    """``sources``: checksums by file; ``packages``: versions by name."""
    return {"sources": sources(), "packages": packages()}


def sources() -> dict[str, int]:
    """Checksums of the owner's imported modules, wherever they lie, and one of the harness.

    The harness counts whole: which of its modules are imported depends on the command.
    """
    found = {}
    for key, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or LIBRARIES.search(file):
            continue  # said without asking the file system, as of thousands
        if key != "__mp_main__" and key.partition(".")[0] != "harness" and is_owners(file):
            path = Path(file)
            stem = path.stem if key == "__main__" else key.replace(".", "/")
            with suppress(OSError):  # gone since
                name = stem + ("/__init__" if path.stem == "__init__" else "") + path.suffix
                found[name] = zlib.crc32(path.read_bytes())
    ours = 0
    for path in sorted(HARNESS.rglob("*.py")):
        ours = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), ours))
    return found | {"harness": ours}


def packages() -> dict[str, str]:
    """Versions of Python and of installed packages, but for those that are folders here.

    The names of their folders say it: to open each of them would take a tenth of a second.
    """
    found: dict[str, str] = {}
    for folder in map(Path, sys.path):
        for path in folder.glob("*.dist-info") if folder.is_dir() else []:
            match, origin = DISTRIBUTION.fullmatch(path.name), path / "direct_url.json"
            source: dict[str, Any] = {}
            with suppress(OSError, ValueError):
                source = json.loads(origin.read_bytes()) if origin.is_file() else {}
            if match and "dir_info" not in source:
                found.setdefault(match[1].replace("_", "-").lower(), match[2])  # as is imported
    return {"Python": platform.python_version(), **dict(sorted(found.items()))}


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of Python and of packages, by the names that are imported."""
    found = {"Python": platform.python_version()}
    for name in sorted(set(names) - sys.stdlib_module_names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # installed by another name, or not at all
            if version := getattr(sys.modules.get(name), "__version__", None):
                found[name] = str(version)
    return found


def changes(run_dir: Path) -> str | None:
    """Say in what this process's code and packages differ from those of a run's last training.

    Returns:
        One line; ``None`` where nothing differs, or a dry run or version 0.3 has noted nothing.
    """
    starts = [start for start in record.read(run_dir).get("starts", []) if "code" in start]
    if not starts:
        return None
    before, now = starts[-1]["code"], running()
    known = now["sources"]
    changed = [n for n, checksum in before["sources"].items() if known.get(n, checksum) != checksum]
    changed += versions(before["packages"], now["packages"])
    if not changed:
        return None
    commit = str(starts[-1].get("commit") or "")[:10]
    diff = starts[-1].get("diff")
    by = f" by commit {commit}{f' and {diff}' if diff else ''}" if commit else ""
    return f"The code has changed since the run was trained{by}: {few(changed, NUM_SHOWN)}."


def versions(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Packages whose versions differ, the telling ones first; builds, as "+cpu", do not count."""
    telling = [name.replace("_", "-") for name in ("Python", *ALWAYS)]
    differing = [
        name
        for name, version in before.items()
        if now.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]
    differing.sort(key=lambda name: telling.index(name) if name in telling else len(telling))
    return [f"{name} {before[name]} -> {now.get(name, 'not installed')}" for name in differing]
