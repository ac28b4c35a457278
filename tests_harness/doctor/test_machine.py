import os
from collections import namedtuple
from pathlib import Path

import pytest

from harness.doctor import machine as this

Usage = namedtuple("Usage", "total used free")


def test_cores_name_the_quota_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this, "usable_cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(this, "cpu_quota", lambda: 2.5)
    section = this.cores()
    assert section.text == "2 usable of 64; a control group allows the time of 2.5"
    assert section.values == {"usable": 2, "there": 64, "quota": 2.5}


def test_docker_s_shared_memory_is_too_small(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(this, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(this.shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    (problem,) = this.shared_memory().problems
    assert "64 MiB free" in problem.what
    assert "--shm-size=8g" in problem.remedy
    monkeypatch.setattr(this.shutil, "disk_usage", lambda _: Usage(2**33, 0, 2**32))
    assert this.shared_memory().problems == []
    assert "4.0 GiB free of 8.0 GiB" in this.shared_memory().text


def test_system_without_shared_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(this, "SHARED_MEMORY", tmp_path / "missing")
    assert this.shared_memory().problems == []


def test_disk_is_that_of_the_first_folder_that_exists(tmp_path: Path) -> None:
    section = this.disk(tmp_path / "a" / "b")
    assert section.values["free_bytes"] > 0
    assert section.problems == []
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_broken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(this.shutil, "disk_usage", lambda _: Usage(2**40, 0, 2**29))
    (problem,) = this.disk(tmp_path).problems
    assert "0.5 GiB left" in problem.what
    assert "output_dir=<folder>" in problem.remedy


def test_folder_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # where root, too, can write nothing
    (problem,) = this.disk(tmp_path / "file" / "outputs").problems
    assert "cannot be written" in problem.what
    assert "output_dir=<folder>" in problem.remedy
