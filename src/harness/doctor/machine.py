"""Cores, memory, shared memory and disk: what this process really gets of each."""

import os
import shutil
import tempfile
from pathlib import Path

from harness.doctor.section import Problem, Section
from harness.machine.cgroups import cpu_quota, memory_limit
from harness.machine.cores import usable_cores
from harness.machine.nvml import gib

SHARED_MEMORY = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
# Docker gives 64 MiB, and a data worker that needs more is killed with "Bus error".
LEAST_SHARED_MEMORY = 2**28
LEAST_DISK = 2**30


def cores() -> Section:
    """Cores of this process: by its affinity, and by the quota of a container or a batch job."""
    usable, there, quota = usable_cores(), os.cpu_count() or 1, cpu_quota()
    text = f"{usable} usable of {there}"
    if quota is not None:
        text += f"; a control group allows the time of {quota:g}"
    return Section("CPU cores", text, {"usable": usable, "there": there, "quota": quota})


def memory() -> Section:
    """The machine's memory, and the limit of a container or a batch job."""
    total, available = _memory()
    limit = memory_limit()
    text = f"{gib(total)}, {gib(available)} available"
    if limit is not None:
        text += f"; a control group allows {gib(limit)}"
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    return Section("memory", text, values)


def _memory() -> tuple[int, int]:
    """All of it, and what can be had without swapping, in bytes."""
    try:
        lines = [line.split() for line in MEMINFO.read_text().splitlines()]
        kib = {words[0]: int(words[1]) for words in lines}
        return kib["MemTotal:"] * 1024, kib["MemAvailable:"] * 1024
    except OSError:  # macOS, which does not tell what is available
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total


def shared_memory() -> Section:
    """Where data workers hand over their batches."""
    if not SHARED_MEMORY.is_dir():
        return Section("shared memory", f"no {SHARED_MEMORY} on this system", None)
    usage = shutil.disk_usage(SHARED_MEMORY)
    section = Section(
        "shared memory",
        f"{gib(usage.free)} free of {gib(usage.total)} in {SHARED_MEMORY}",
        {"total_bytes": usage.total, "free_bytes": usage.free},
    )
    if usage.free < LEAST_SHARED_MEMORY:
        section.problems.append(
            Problem(
                f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} MiB free: data workers may die of it"
                " (Bus error)",
                "Start the container with --shm-size=8g, or use data.num_workers=0.",
            )
        )
    return section


def disk(folder: Path) -> Section:
    """Room for runs, where the first existing folder above ``folder`` is.

    Args:
        folder: ``output_dir``.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    values = {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
    section = Section("disk", f"{gib(usage.free)} free for {folder}", values)
    elsewhere = "or choose another folder with output_dir=<folder>."
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        section.problems.append(
            Problem(
                f"{folder} cannot be written: {error.strerror}",
                f"Make {there} a folder that you may write to, {elsewhere}",
            )
        )
    if usage.free < LEAST_DISK:
        section.problems.append(
            Problem(
                f"{folder} has {gib(usage.free)} left: checkpoints may not fit",
                f"Make room, {elsewhere}",
            )
        )
    return section
