"""What all processes of a run must have in common: settings, code, and versions of packages."""

import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import harness
from harness.code_version import ALWAYS, installed_versions
from harness.command.compose import Command
from harness.names import flat, is_below

# Where a process is, and what the first one decides.
OWN = ("output_dir", "run_dir", "resume", "checkpoint", "output")
LARGEST_FILE = 2**20  # of what is code, and not data beside it


def what_counts(command: Command) -> dict[str, dict[str, Any]]:
    """Plain values by kind and name; files by checksums of their bytes."""
    cfg: Any = OmegaConf.to_container(command.cfg, resolve=True)
    may_differ = (*OWN, *command.rules.get("may_differ", ()))
    settings = {k: str(value) for k, value in flat(cfg).items() if not is_below(k, may_differ)}
    named = {*re.findall(r"_target_: (\w+)\.", OmegaConf.to_yaml(command.cfg)), *ALWAYS}
    lock = command.conf.parent / "requirements.lock"
    if lock.is_file():
        named |= {*re.findall(r"^([\w.-]+)==", lock.read_text(), re.MULTILINE)}
    return {
        "settings": settings,
        "code": {name: zlib.crc32(path.read_bytes()) for name, path in _files(command.conf, lock)},
        "versions": installed_versions(named - {"harness"}),
    }


def _files(conf: Path, lock: Path) -> Iterator[tuple[str, Path]]:
    """The owner's files and the harness's, and what tells the versions of others."""
    sources, package = conf.parent / "src", Path(harness.__file__).parent
    folders = [sources] if package.is_relative_to(sources) else [sources, package]
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            is_made = "__pycache__" in path.parts or ".egg-info" in str(path)
            if path.is_file() and not is_made and path.stat().st_size <= LARGEST_FILE:
                yield f"{folder.name}/{path.relative_to(folder)}", path
    for path in (Path(sys.argv[0]), lock):
        if path.is_file():
            yield path.name, path
