"""Cores that a container gives, for version 1 and 2 of control groups."""

import os
from pathlib import Path

from harness import machine as limits


def test_cores_are_those_of_the_affinity_and_the_quota(tmp_path: Path, monkeypatch) -> None:
    v1 = {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}
    for nth, (affinity, files, expected) in enumerate(
        (
            (16, {}, 16),
            (16, {"cpu.max": "max 100000\n"}, 16),
            (16, {"cpu.max": "350000 100000\n"}, 3),
            (16, {"cpu.max": "50000 100000"}, 1),
            (2, {"cpu.max": "800000 100000"}, 2),
            (16, v1, 2),
            (16, v1 | {"cpu/cpu.cfs_quota_us": "-1"}, 16),
        )
    ):
        monkeypatch.setattr(limits, "GROUPS", tmp_path / str(nth))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=affinity: {*range(n)}, False)
        (tmp_path / str(nth) / "cpu").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / str(nth) / name).write_text(text)
        assert limits.usable_cores() == expected, files
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert limits.usable_cores() == 10
