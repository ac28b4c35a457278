"""No damaged or partial file is ever taken for a checkpoint."""

import errno
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import lookup
from harness.checkpoints.reading import unreadable
from harness.checkpoints.writing import DurableCheckpointIO
from harness.files import PART, remove_parts
from tests.faults.damage import damages, not_rejected


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> Path:
    for step in (9, 10):  # by number: as text, 9 would be the newest
        values = {"weights": torch.randn(20_000), "step": step, "rates": [0.1, 0.2]}
        DurableCheckpointIO().save_checkpoint(values, lookup.path_of(tmp_path, step))
    return tmp_path


def test_damaged_newest_is_skipped_and_said(two_checkpoints: Path) -> None:
    assert len(damages(1 << 20, random.Random(0))) >= 9
    assert not_rejected(two_checkpoints, seed=0) == []


def test_any_flipped_bit_is_rejected_or_means_nothing(tmp_path: Path) -> None:
    """Between an archive's members is padding, which no checksum covers and nobody reads."""
    path = lookup.path_of(tmp_path, 1)
    expected = {"weights": torch.randn(50), "step": 3}
    DurableCheckpointIO().save_checkpoint(expected, path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        if unreadable(path) is None:
            found = torch.load(path, weights_only=True)
            assert torch.equal(found["weights"], expected["weights"]), position
            assert found["step"] == 3


def test_damaged_checkpoint_does_not_push_out_whole_ones(two_checkpoints: Path) -> None:
    newest = two_checkpoints / "step_10.ckpt"
    newest.write_bytes(b"")
    lookup.set_aside_newer(two_checkpoints / "step_9.ckpt")
    assert lookup.by_step(two_checkpoints) == [two_checkpoints / "step_9.ckpt"]
    assert (two_checkpoints / "step_10.ckpt.damaged").exists()


def write_for_ever(folder: Path, step: int) -> None:
    """What a run does with its checkpoints, and nothing else; 4 MB take some milliseconds."""
    io = DurableCheckpointIO()
    while True:
        step += 1
        path, values = lookup.path_of(folder, step), torch.full((1_000_000,), float(step))

        def count_on_it(path: Path = path) -> None:
            lookup.link_newest(path)
            lookup.remove_old(folder, 2)

        io.save_checkpoint({"step": step, "values": values}, path, count_on_it)
        values.zero_()  # as training changes them while they are written


def test_killed_writer_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng, newest_step = random.Random(0), 0
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            try:
                write_for_ever(tmp_path, newest_step)
            finally:
                os._exit(1)
        end = time.monotonic() + 60
        while not list(tmp_path.glob(f".*{PART}")) and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path, skipped = lookup.newest_whole(tmp_path)
        assert skipped == []
        assert path is not None or newest_step == 0
        if path is not None:
            checkpoint = torch.load(path, weights_only=True)
            assert checkpoint["step"] >= newest_step
            assert (checkpoint["values"] == checkpoint["step"]).all()
            newest_step = checkpoint["step"]
        remove_parts(tmp_path)


def test_values_may_change_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on; the link and the removal of the oldest wait for the file."""
    goes_on, order = threading.Event(), []
    sync = os.fsync

    def sync_late(descriptor: int) -> None:
        assert goes_on.wait(20)
        sync(descriptor)
        order.append("synced")

    monkeypatch.setattr(os, "fsync", sync_late)
    io, weights = DurableCheckpointIO(), torch.zeros(1000)
    path = lookup.path_of(tmp_path, 1)
    io.save_checkpoint({"weights": weights}, path, lambda: order.append("safe"))
    weights += 1
    assert not path.exists()
    goes_on.set()
    io.finish()
    assert order == ["synced", "synced", "safe"]  # the file and its folder
    assert torch.load(path)["weights"].sum() == 0


def test_error_of_the_disk_is_raised_once_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    io = DurableCheckpointIO()
    io.save_checkpoint({"weights": torch.zeros(9000)}, tmp_path / "a.ckpt", lambda: None)
    with pytest.raises(OSError, match="Input/output"):
        io.finish()
    io.finish()  # told once
    assert list(tmp_path.iterdir()) == []


class FullFile:
    """Takes some bytes, and then none."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        if self.file.tell() > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("moment", ["written", "synced"])
def test_full_disk_is_said_and_the_last_checkpoint_stands(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, path = DurableCheckpointIO(), lookup.path_of(tmp_path, 1)
    io.save_checkpoint({"step": 1}, path)
    save = torch.save

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "written":
        monkeypatch.setattr(torch, "save", lambda content, file: save(content, FullFile(file)))
    else:
        monkeypatch.setattr(os, "fsync", fail)
    io.save_checkpoint({"step": 1, "weights": torch.zeros(9000)}, path)
    assert io.met_full_disk
    assert [file.name for file in tmp_path.iterdir()] == ["step_1.ckpt"]
    assert lookup.damage(path) is None
