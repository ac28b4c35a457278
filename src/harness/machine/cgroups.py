"""What a container or a batch job allows this process: Linux control groups, version 1 and 2."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


def cpu_quota() -> float | None:
    """Processor time per time, so 2.5 is two and a half cores; ``None`` without a limit."""
    limits = [
        int(quota) / int(period)
        for quota, period in (*_pairs("cpu.max"), *_pairs("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if quota not in ("max", "-1")
    ]
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Bytes that this process and those of its group may use; ``None`` without a limit."""
    files = ((folder / name) for folder in _folders("memory") for name in _MEMORY_FILES)
    limits = [int(text) for file in files if (text := _read(file)) not in ("", "max")]
    # Version 1 writes "no limit" as the largest number of pages.
    return min((limit for limit in limits if limit < 2**60), default=None)


_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")


def _pairs(name: str, second: str | None = None) -> Iterator[list[str]]:
    """Quota and period, which version 2 keeps in one file and version 1 in two."""
    for folder in _folders("cpu"):
        words = _read(folder / name).split()
        if second:
            words += _read(folder / second).split()
        if len(words) == 2:
            yield words


def _folders(controller: str) -> Iterator[Path]:
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
        folder = Path(mount_point, *(part for part in below.parts if part != ".."))
        while folder.is_relative_to(mount_point):
            yield folder
            folder = folder.parent


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # not Linux, another version, or not ours to read
        return ""


def _unescape(word: str) -> str:
    """Mount points write a space as backslash 040."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), word)
