"""Messages for disks that are full, read-only, or too small for data workers."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.faults.fork_server import fork

WORDS = ("model=mlp", "trainer.max_epochs=2", "strategy=cpu", "trainer.enable_progress_bar=false")


def may_mount() -> bool:
    """Return whether this process may mount a private file system."""
    unshare = shutil.which("unshare")
    words = [str(unshare), "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        unshare is not None
        and not subprocess.run(words, capture_output=True, check=False).returncode
    )


pytestmark = pytest.mark.skipif(not may_mount(), reason="needs the right to mount a small disk")
NEW_MOUNTS = 0x20000  # CLONE_NEWNS of sched.h


def run_on(mount: str, screen: Path, *words: str, after: str = "true") -> tuple[int, str]:
    """Run a command where something is mounted that only it sees; its status and its errors."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            ctypes.CDLL(None).unshare(NEW_MOUNTS)
            if os.system(f"mount --make-rprivate / && mount {mount}") == 0:
                status = fork(["train.py", *WORDS, *words], dict(os.environ), screen).wait()
                os.system(after)
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, screen.with_suffix(".err").read_text()


def tmpfs(size: str, place: Path | str) -> str:
    return f"-t tmpfs -o size={size} tmpfs {place}"


def test_full_disk_costs_the_checkpoints_that_find_no_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    keep = f"cp -r {disk}/default {tmp_path}/kept"
    words = (tmp_path / "screen", f"output_dir={disk}", "checkpoint.every_n_steps=10")
    status, said = run_on(tmpfs("620k", disk), *words, after=keep)
    assert status == 0, said
    assert "was not written: " in said
    assert "No space left on device" in said
    assert "Traceback" not in said
    assert list((tmp_path / "kept").glob("*/results.json"))


def test_data_workers_without_shared_memory(tmp_path: Path) -> None:
    words = (f"output_dir={tmp_path}/out", "data.num_workers=1", "data.batch_size=1024")
    status, said = run_on(tmpfs("100k", "/dev/shm"), tmp_path / "screen", *words)
    assert status == 1
    assert "Traceback" not in said
    assert said.count("/dev/shm") == 1
    assert "docker run --shm-size" in said
    assert "data.num_workers" in said
