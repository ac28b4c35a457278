import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.machine import locks

HOLD = """
import os, pathlib, sys, time
from harness.machine import locks
locks.FOLDER = pathlib.Path(sys.argv[1])
print(locks.acquire("GPU-1"), flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:  # as a data worker
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def process(folder: Path, kind: str = "plain") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), kind], stdout=subprocess.PIPE, text=True
    )


def test_gpu_is_held_by_one_process_until_it_is_killed(lock_folder: Path) -> None:
    with process(lock_folder) as first:
        assert first.stdout.readline() == "True\n"
        with process(lock_folder) as second:
            assert second.stdout.readline() == "False\n"
            second.kill()
        assert not locks.acquire("GPU-1")
        assert locks.acquire("GPU-2")
        assert locks.holder("GPU-1") == first.pid
        first.send_signal(signal.SIGKILL)
    assert locks.acquire("GPU-1")
    assert locks.holder("GPU-1") == os.getpid()


def test_forked_worker_does_not_hold_its_process_s_gpu(lock_folder: Path) -> None:
    with process(lock_folder, "fork") as first:
        assert first.stdout.readline() == "True\n"
        worker = int(first.stdout.readline())
        try:
            assert not locks.acquire("GPU-1")
            os.kill(first.pid, signal.SIGKILL)
            os.waitpid(first.pid, 0)
            assert locks.acquire("GPU-1")
        finally:
            os.kill(worker, signal.SIGKILL)


def test_released_gpu_can_be_taken(lock_folder: Path) -> None:
    assert locks.acquire("GPU-1")
    assert not locks.acquire("GPU-1")
    locks.release("GPU-1")
    assert locks.holder("GPU-1") is None
    assert locks.acquire("GPU-1")


def test_unknown_gpu_is_held_by_nobody(lock_folder: Path) -> None:
    assert locks.holder("GPU-1") is None


def test_lock_file_serves_every_user_whatever_the_umask(lock_folder: Path) -> None:
    before = os.umask(0o077)
    try:
        assert locks.acquire("MIG-GPU-1/2/3")
    finally:
        os.umask(before)
    (file,) = lock_folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_other_user_sees_and_takes_the_lock(lock_folder: Path, tmp_path_factory) -> None:
    """Their folder is one like /tmp: of root, writable by all, sticky."""
    for folder in (lock_folder, *lock_folder.parents):
        if folder != Path(folder.anchor) and folder != Path("/tmp"):
            folder.chmod(0o755)
    lock_folder.chmod(0o1777)
    assert locks.acquire("GPU-1")
    locks.release("GPU-1")
    for is_held in (True, False):
        if is_held:
            assert locks.acquire("GPU-1")
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            os._exit(int(locks.acquire("GPU-1")))
        taken = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert taken != is_held
        if is_held:
            locks.release("GPU-1")


def test_file_that_was_cleaned_away_does_not_let_two_in(
    lock_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking somebody removes the file, and another run makes a new one."""
    real_open, times = locks._open, []

    def open_then_clean(path: Path) -> int:
        descriptor = real_open(path)
        if not times:
            path.unlink()
        times.append(path)
        return descriptor

    monkeypatch.setattr(locks, "_open", open_then_clean)
    assert locks.acquire("GPU-1")
    assert len(times) == 2
    assert locks._is_at(locks.HELD["GPU-1"], lock_folder / "train_GPU-1.lock")


def test_file_of_another_kind_is_refused(lock_folder: Path) -> None:
    (lock_folder / "train_GPU-1.lock").symlink_to(lock_folder / "elsewhere")
    with pytest.raises(UserError, match="Remove it, or name the GPUs"):
        locks.acquire("GPU-1")
    assert not (lock_folder / "elsewhere").exists()


def test_process_that_never_ends_choosing_is_named(
    lock_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.0)
    with (
        locks.choosing(),
        pytest.raises(UserError, match=f"Process {os.getpid()} has been choosing"),
        locks.choosing(),
    ):
        pass
    with locks.choosing():  # it was given back
        pass
