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
from harness.checkpoints.reading import newest_intact, unreadable
from harness.checkpoints.writing import DurableCheckpointIO
from harness.files import PARTIAL, remove_partial_files
from tests.faults.damage import damages
from tests.faults.storm import wait_until


def test_damaged_newest_is_skipped_and_said_and_does_not_push_out_whole_ones(
    tmp_path: Path,
) -> None:
    for step in (9, 10):  # by number: as text, 9 would be the newest
        values = {"weights": torch.randn(20_000), "step": step, "rates": [0.1, 0.2]}
        DurableCheckpointIO().save_checkpoint(values, lookup.path_of(tmp_path, step))
    before, newest = lookup.by_step(tmp_path)
    assert newest_intact(tmp_path) == (newest, [])
    for name, damaged in damages(newest.read_bytes()).items():
        newest.write_bytes(damaged)
        path, (line,) = newest_intact(tmp_path)
        assert path == before, name
        assert "step_10.ckpt is damaged and was skipped" in line
    lookup.set_aside_newer(before)
    assert lookup.by_step(tmp_path) == [before]
    assert (tmp_path / "step_10.ckpt.damaged").exists()


def test_any_flipped_bit_is_rejected_or_means_nothing(tmp_path: Path) -> None:
    """Between an archive's members is padding, which no checksum covers and no reader uses."""
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


def write_for_ever(folder: Path, step: int) -> None:
    """A run's work on its checkpoints alone; 4 MB take some milliseconds."""
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
        wait_until(lambda: [*tmp_path.glob(f".*{PARTIAL}")], 60)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path, skipped = newest_intact(tmp_path)
        assert skipped == []
        assert path is not None or newest_step == 0
        if path is not None:
            checkpoint = torch.load(path, weights_only=True)
            assert checkpoint["step"] >= newest_step
            assert (checkpoint["values"] == checkpoint["step"]).all()
            newest_step = checkpoint["step"]
        remove_partial_files(tmp_path)


def test_training_goes_on_while_a_checkpoint_is_synced_and_nobody_counts_on_it_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(
    ("moment", "error"),
    [("written", errno.ENOSPC), ("synced", errno.ENOSPC), ("synced", errno.EIO)],
)
def test_full_disk_is_said_another_error_is_raised_and_the_last_checkpoint_stands(
    moment: str,
    error: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    io, path, save = DurableCheckpointIO(), lookup.path_of(tmp_path, 1), torch.save
    io.save_checkpoint({"step": 1}, path)

    def fail(descriptor: int) -> None:
        raise OSError(error, os.strerror(error))

    if moment == "written":
        monkeypatch.setattr(torch, "save", lambda content, file: save(content, FullFile(file)))
    else:
        monkeypatch.setattr(os, "fsync", fail)
    io.save_checkpoint({"step": 1, "weights": torch.zeros(9000)}, path, lambda: None)
    if error == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            io.finish()
    io.finish()  # an error is raised once
    assert ("was not written: No space left on device" in caplog.text) == (error == errno.ENOSPC)
    assert [file.name for file in tmp_path.iterdir()] == ["step_1.ckpt"]
    assert lookup.damage(path) is None
