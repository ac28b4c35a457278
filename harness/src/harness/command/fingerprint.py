"""Describe what all processes of a run must have in common: settings, code, package versions.

In: a composed ``Command``. Out: plain values by name. Next: ``processes.meeting`` compares them.
"""

import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness.code_version import ALWAYS, installed_versions
from harness.command.compose import Command
from harness.names import flat, is_below
from harness.places import HARNESS

# Keys that differ between ranks by design, and are not compared.
NOT_COMPARED = ("output_dir", "run_dir", "resume", "checkpoint", "output")
LARGEST_FILE = 2**20  # bytes; larger files are data that lie beside the code


def fingerprint(command: Command) -> dict[str, Any]:
    """Return settings and versions as texts, and files as checksums, which are numbers."""
    cfg: Any = OmegaConf.to_container(command.cfg, resolve=True)
    may_differ = (*NOT_COMPARED, *command.rules.get("may_differ", ()))
    settings = {k: str(value) for k, value in flat(cfg).items() if not is_below(k, may_differ)}
    lock = command.conf.parent / "requirements.lock"
    packages = {*re.findall(r"_target_: (\w+)\.", OmegaConf.to_yaml(command.cfg)), *ALWAYS}
    if lock.is_file():
        packages |= {*re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE)}
    versions = installed_versions(packages - {"harness"})
    sources = command.conf.parent / "src"
    files = {name: zlib.crc32(path.read_bytes()) for name, path in _files(sources)}
    for path in (Path(sys.argv[0]), lock):
        if path.is_file():
            files[path.name] = zlib.crc32(path.read_bytes())
    return settings | versions | files


def _files(sources: Path) -> Iterator[tuple[str, Path]]:
    """Yield the owner's files and the harness's, with the names that all machines have."""
    for folder in {sources, HARNESS}:
        for path in sorted(folder.rglob("*")):
            is_made = "__pycache__" in path.parts or ".egg-info" in str(path)
            if path.is_file() and not is_made and path.stat().st_size <= LARGEST_FILE:
                yield f"{folder.name}/{path.relative_to(folder)}", path
