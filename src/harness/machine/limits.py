"""How many cores a container or a batch job leaves to this process.

Linux keeps its limits in control groups, of version 1 or 2.
"""

import os
from collections.abc import Iterator
from pathlib import Path

GROUP_OF_PROCESS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or its group's quota rounded down."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, cpu_quota() or cores)))


def cpu_quota() -> float | None:
    """Seconds of processor time per second, as 2.5 for two and a half cores; None: no limit."""
    limits = []
    for folder in _group_folders():
        # Version 2 keeps quota and period in one file, version 1 in two.
        text = _read(folder / "cpu.max") or " ".join(
            _read(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        quota, _, period = text.partition(" ")
        if quota not in ("", "max", "-1") and period:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _group_folders() -> Iterator[Path]:
    """The folder of this process's group and those above it: each may set a limit.

    A container often sees its own group as the root: then the longer paths do not exist.
    """
    for line in _read(GROUP_OF_PROCESS).splitlines():  # "0::/job" or "3:cpu,cpuacct:/job"
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = GROUPS / "cpu" if controllers else GROUPS
        group = Path(*(name for name in path.split("/") if name not in ("", "..")))
        yield from (top / folder for folder in (group, *group.parents))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the system is not Linux, has the other version, or forbids reading
        return ""
