"""How many cores and bytes a container or a batch job leaves to this process.

Linux keeps such limits in control groups, of version 1 or 2.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


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
    for folder in _group_folders("cpu"):
        # Version 2 keeps quota and period in one file, version 1 in two.
        text = _read(folder / "cpu.max") or " ".join(
            _read(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        )
        quota, _, period = text.partition(" ")
        if quota not in ("", "max", "-1") and period:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Bytes that the processes of this group may use together; None: no limit."""
    limits = []
    for folder in _group_folders("memory"):
        text = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        # Version 1 writes "no limit" as the largest number of pages.
        if text not in ("", "max") and int(text) < 2**60:
            limits.append(int(text))
    return min(limits, default=None)


def _group_folders(controller: str) -> Iterator[Path]:
    """The folder of this process's group and those above it: each may set a limit."""
    groups = {}
    for line in _read(PROC / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in _read(PROC / "mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        root, mount_point = (_unescape(word) for word in place.split()[3:5])
        file_system, _, options = kind.split()[:3]
        is_version_2 = file_system == "cgroup2"
        if not is_version_2 and (file_system != "cgroup" or controller not in options.split(",")):
            continue
        group = PurePosixPath(groups.get("" if is_version_2 else controller, "/"))
        # A container may see its own group as the root, or one that it cannot see as /../x.
        below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        folder = Path(mount_point, *(name for name in below.parts if name != ".."))
        while folder.is_relative_to(mount_point):
            yield folder
            folder = folder.parent


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the system is not Linux, has the other version, or forbids reading
        return ""


def _unescape(word: str) -> str:
    """Mount points write a space as backslash 040."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), word)
