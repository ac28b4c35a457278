"""Describe what all processes of a run must have in common: settings, code, package versions.

In: a composed ``Command``. Out: plain values by name. Next: ``processes.meeting`` compares them.
"""

import re
import sys
import zlib
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import harness
from harness import record
from harness.command.compose import Command
from harness.names import flat, is_below

# Keys that differ between ranks by design, and are not compared.
NOT_COMPARED = ("output_dir", "run_dir", "resume", "checkpoint", "output")
LARGEST_FILE = 2**20  # bytes; larger files are data that lie beside the code


def fingerprint(command: Command) -> dict[str, Any]:
    """Return settings and versions as texts, and a checksum of the code, which is a number."""
    cfg: Any = OmegaConf.to_container(command.cfg, resolve=True)
    may_differ = (*NOT_COMPARED, *command.rules.get("may_differ", ()))
    settings = {k: str(value) for k, value in flat(cfg).items() if not is_below(k, may_differ)}
    lock = command.conf.parent / "requirements.lock"
    names = {*re.findall(r"_target_: (\w+)\.", OmegaConf.to_yaml(command.cfg))}
    if lock.is_file():
        names |= {*re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE)}
    compared = {*record.MAIN_PACKAGES, *(name.replace("_", "-").lower() for name in names)}
    versions = {name: text for name, text in record.packages().items() if name in compared}
    return (
        settings
        | versions
        | {
            "code (src, program, requirements.lock, harness)": _checksum(
                command.conf.parent / "src", lock
            )
        }
    )


def _checksum(*owners: Path) -> int:
    """Return one checksum of the owner's files, the program and the harness."""
    checksum = 0
    for place in (*owners, Path(sys.argv[0]), Path(harness.__path__[0])):
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            is_made = "__pycache__" in path.parts or ".egg-info" in str(path)
            if path.is_file() and not is_made and path.stat().st_size <= LARGEST_FILE:
                name = str(path.relative_to(place))
                checksum = zlib.crc32(name.encode() + path.read_bytes(), checksum)
    return checksum
