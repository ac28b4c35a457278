"""Count the cores that a container leaves to this process, by its control group.

Linux shows a container its own group, of version 1 or 2, as the root of all groups.
"""

import os
from contextlib import suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
# Quota and period in microseconds: one file in version 2, two in version 1.
QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def usable_cores() -> int:
    """Return this process's cores: its affinity, or its container's quota rounded down."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for files in QUOTAS:
        with suppress(OSError):  # not Linux, the other version, or not for this user
            quota, period = " ".join((GROUPS / name).read_text() for name in files).split()
            if quota not in ("max", "-1"):
                cores = min(cores, int(quota) // int(period))
    return max(1, cores)
