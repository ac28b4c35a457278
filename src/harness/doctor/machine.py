"""What this process gets of the machine: cores, shared memory, disk, packages."""

import os
import platform
import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from harness.doctor.report import Section
from harness.machine.limits import cpu_quota, usable_cores
from harness.machine.nvml import gib

SHARED_MEMORY = Path("/dev/shm")
# Docker gives 64 MiB, and a data worker that needs more is killed with "Bus error".
LEAST_SHARED_BYTES = 2**28
LEAST_DISK_BYTES = 2**30
SHOWN = ("torch", "pytorch-lightning", "hydra-core")


def cores() -> Section:
    """Cores of this process: by its affinity, and by the quota of a container or a batch job."""
    usable, there, quota = usable_cores(), os.cpu_count() or 1, cpu_quota()
    text = f"{usable} usable of {there}"
    if quota is not None:
        text += f"; a control group allows the time of {quota:g}"
    return Section("CPU cores", text, {"usable": usable, "there": there, "quota": quota})


def shared_memory() -> Section:
    """The memory through which data workers hand over their batches."""
    if not SHARED_MEMORY.is_dir():
        return Section("shared memory", f"no {SHARED_MEMORY} on this system", None)
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{gib(usage.free)} free of {gib(usage.total)} in {SHARED_MEMORY}"
    section = Section("shared memory", text, {"free_bytes": usage.free})
    if usage.free < LEAST_SHARED_BYTES:
        section.broken(
            f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} MiB free: data workers may die of it"
            " (Bus error)",
            "Start the container with --shm-size=8g, or use data.num_workers=0.",
        )
    return section


def disk(folder: Path) -> Section:
    """Free bytes for runs, on the disk of the first folder at or above ``folder`` that exists."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    section = Section("disk", f"{gib(usage.free)} free for {folder}", {"free_bytes": usage.free})
    remedy = f"Make room in {there} and the right to write, or choose output_dir=<folder>."
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        section.broken(f"{folder} cannot be written: {error.strerror}", remedy)
    if usage.free < LEAST_DISK_BYTES:
        section.broken(f"{folder} has {gib(usage.free)} left: checkpoints may not fit", remedy)
    return section


def versions(pyproject: Path) -> Section:
    """The installed packages against the bounds of the project."""
    section = Section("versions", f"Python {platform.python_version()}", {})
    for requirement in bounds(pyproject):
        name, within = requirement.name, requirement.specifier
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        if name in SHOWN:
            section.text += f"\n{name} {version}"
        section.values[name] = {"installed": version, "bounds": str(within)}
        if version is None or not within.contains(version, prereleases=True):
            section.broken(
                f"{name} {version or 'none'} is installed, and the project takes {within}",
                f'Install it: pip install "{requirement}"',
            )
    return section


def bounds(pyproject: Path) -> list[Requirement]:
    """The packages of ``dependencies = [...]``; Python 3.10 cannot read TOML by itself."""
    block = re.search(r"^dependencies = \[(.*?)^\]", pyproject.read_text(), re.S | re.M)
    assert block is not None
    return [Requirement(text) for text in re.findall(r'^\s*"([^"]+)"', block[1], re.M)]
