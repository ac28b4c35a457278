"""What this process gets of the machine: cores, memory, shared memory, disk, packages."""

import os
import platform
import re
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from harness.doctor.report import Section
from harness.machine.limits import cpu_quota, memory_limit, usable_cores
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


def memory() -> Section:
    """The machine's memory, and the limit of a container or a batch job."""
    total, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    text = gib(total) if limit is None else f"{gib(total)}; a control group allows {gib(limit)}"
    return Section("memory", text, {"total_bytes": total, "limit_bytes": limit})


def shared_memory() -> Section:
    """The memory through which data workers hand over their batches."""
    if not SHARED_MEMORY.is_dir():
        return Section("shared memory", f"no {SHARED_MEMORY} on this system", None)
    usage = shutil.disk_usage(SHARED_MEMORY)
    text = f"{gib(usage.free)} free of {gib(usage.total)} in {SHARED_MEMORY}"
    values = {"total_bytes": usage.total, "free_bytes": usage.free}
    section = Section("shared memory", text, values)
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
    values = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    section = Section("disk", f"{gib(usage.free)} free for {folder}", values)
    elsewhere = "or choose another folder with output_dir=<folder>."
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        section.broken(
            f"{folder} cannot be written: {error.strerror}",
            f"Make {there} a folder that you may write to, {elsewhere}",
        )
    if usage.free < LEAST_DISK_BYTES:
        section.broken(
            f"{folder} has {gib(usage.free)} left: checkpoints may not fit",
            f"Make room, {elsewhere}",
        )
    return section


def versions(root: Path) -> Section:
    """The installed packages against those that the project is tested with.

    Args:
        root: the folder of pyproject.toml, which has the bounds, and of requirements.lock, which
            has the versions that all tests have passed with.
    """
    tested = locked(root / "requirements.lock")
    section = Section("versions", f"Python {platform.python_version()}", {})
    for requirement in bounds(root / "pyproject.toml"):
        name, within = requirement.name, requirement.specifier
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        if name in SHOWN:
            section.text += f"\n{name} {version} (tested: {tested.get(name)})"
        section.values[name] = {
            "installed": version,
            "tested": tested.get(name),
            "bounds": str(within),
        }
        if version is None or not within.contains(version, prereleases=True):
            what = f"{name} {version} is installed, and the project takes {within}"
            section.broken(
                what if version else f"{name} is not installed",
                f'Install it: pip install "{requirement}"',
            )
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
