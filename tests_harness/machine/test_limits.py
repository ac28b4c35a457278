"""Cores that a container gives, for version 1 and 2 of control groups."""

import os
from pathlib import Path

import pytest

from harness.machine import limits
from harness.machine.limits import usable_cores


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write what /proc and /sys would show, and let this process have 16 cores."""
    monkeypatch.setattr(limits, "GROUP_OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "sys")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def write(cgroup: str, files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(cgroup)
        for name, content in files.items():
            path = tmp_path / "sys" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return write


def test_without_limits_the_affinity_counts(container) -> None:
    container("0::/\n", {})
    assert usable_cores() == 16


def test_version_2_quota_of_a_group_above_counts(container) -> None:
    container(
        "0::/job/step\n",
        {
            "job/step/cpu.max": "max 100000\n",
            "job/cpu.max": "350000 100000\n",
        },
    )
    assert limits.cpu_quota() == 3.5
    assert usable_cores() == 3


def test_version_1_quota_counts(container) -> None:
    container(
        "2:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "200000",  # mounted as the container's root
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert usable_cores() == 2


def test_version_1_without_limits(container) -> None:
    container(
        "2:cpu,cpuacct:/\n3:memory:/\n",
        {
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert usable_cores() == 16


def test_less_than_a_core_is_one(container) -> None:
    container("0::/\n", {"cpu.max": "50000 100000"})
    assert usable_cores() == 1


def test_affinity_below_the_quota_counts(container, monkeypatch: pytest.MonkeyPatch) -> None:
    container("0::/\n", {"cpu.max": "800000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5}, raising=False)
    assert usable_cores() == 2


def test_group_that_cannot_be_seen_falls_back_to_the_mount(container) -> None:
    container("0::/../other\n", {"cpu.max": "400000 100000"})
    assert usable_cores() == 4


def test_other_systems_count_their_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "GROUP_OF_PROCESS", tmp_path / "missing")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert usable_cores() == 10
