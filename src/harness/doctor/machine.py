"""What this process gets of the machine: cores, shared memory, disk, packages."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from harness.broken_builds import PACKAGES, blame
from harness.doctor.report import Section
from harness.machine.limits import cpu_quota, usable_cores
from harness.machine.nvml import gib
from harness.upstream.versions import TESTED

SHARED_MEMORY = Path("/dev/shm")
# Docker gives 64 MiB, and a data worker that needs more is killed with "Bus error".
LEAST_SHARED_BYTES = 2**28
LEAST_DISK_BYTES = 2**30


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


def versions() -> Section:
    """The installed packages against the versions that the harness was tested with."""
    section = Section("versions", f"Python {platform.python_version()}", {})
    for name, bounds in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "none"
        section.text += f"\n{name} {version}"
        section.values[name] = version
        if version == "none" or not SpecifierSet(bounds).contains(version, prereleases=True):
            section.broken(
                f"{name} {version} is installed, and tested are {bounds}",
                f'Install it: pip install "{name}{bounds}"',
            )
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            section.text += f"\n{name} {version}"
            section.values[name] = version
            if reason := import_error(name):
                section.broken(*blame(name, reason))
    return section


def import_error(package: str) -> str:
    """Why a package cannot be imported, which is tried in a process of its own; empty if it can."""
    command = [sys.executable, "-c", f"import torch, {package}"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return ""
    said = tried.stderr.strip().splitlines()
    return said[-1] if said else f"exit status {tried.returncode}"
