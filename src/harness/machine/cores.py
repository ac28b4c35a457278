import os

from harness.machine.cgroups import cpu_quota


def usable_cores() -> int:
    """Cores that this process may really use: its affinity and its group's quota, rounded down."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return max(1, int(min(cores, cpu_quota() or cores)))
