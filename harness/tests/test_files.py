"""A file under its own name is whole, and its folder holds nothing else."""

import errno
import os
import stat
from pathlib import Path

import pytest

from harness.files import atomic_write, write_durably


def test_a_file_is_synced_then_named_and_then_its_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes")
        fsync(descriptor)

    def note_replace(part: Path, path: Path) -> None:
        calls.append("name")
        replace(part, path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_durably(tmp_path / "new" / "file", b"content")
    assert calls == ["7 bytes", "name", "folder"]
    assert (tmp_path / "new" / "file").read_bytes() == b"content"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_the_old_contents_and_nothing_else(
    error: BaseException, tmp_path: Path
) -> None:
    write_durably(tmp_path / "file", b"old")

    def fail() -> None:
        with atomic_write(tmp_path / "file") as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    with pytest.raises(FileExistsError), atomic_write(tmp_path / "file", is_forced=False) as file:
        file.write(b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file") as first, atomic_write(tmp_path / "file") as second:
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "file").read_bytes() == b"first"  # whose block ended last
    assert os.listdir(tmp_path) == ["file"]
