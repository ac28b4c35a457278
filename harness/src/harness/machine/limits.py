"""How many cores a container leaves to this process.

Linux keeps the limits of a container in its control group, of version 1 or 2, which the container
sees as the root of all groups.
"""

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or its container's quota rounded down."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, cpu_quota() or cores)))


def cpu_quota() -> float | None:
    """Seconds of processor time per second, as 2.5 for two and a half cores; None: no limit."""
    # Version 2 keeps quota and period in one file, version 1 in two.
    words = _read("cpu.max").split() or [
        *_read("cpu/cpu.cfs_quota_us").split(),
        *_read("cpu/cpu.cfs_period_us").split(),
    ]
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _read(name: str) -> str:
    try:
        return (GROUPS / name).read_text()
    except OSError:  # the system is not Linux, has the other version, or forbids reading
        return ""
