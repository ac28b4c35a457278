"""Disks without room, without the right to write, and too small for data workers: sentences."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.fork_server import Forked

WORDS = ("model=mlp", "trainer.max_epochs=2", "strategy=cpu", "trainer.enable_progress_bar=false")


def may_mount() -> bool:
    """Whether this process may mount a file system that nobody else sees."""
    unshare = shutil.which("unshare")
    words = [str(unshare), "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        unshare is not None
        and not subprocess.run(words, capture_output=True, check=False).returncode
    )


pytestmark = pytest.mark.skipif(not may_mount(), reason="needs the right to mount a small disk")
NEW_MOUNTS = 0x20000  # CLONE_NEWNS of sched.h
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def on(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a command where something is mounted that only it sees."""

    def run(
        mount: str, *arguments: str | Path, after: str = "true"
    ) -> subprocess.CompletedProcess[str]:
        words, path = [*map(str, arguments)], tmp_path_factory.mktemp("screen") / "screen"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ctypes.CDLL(None).unshare(NEW_MOUNTS)
                if os.system(f"mount --make-rprivate / && mount {mount}") == 0:
                    status = Forked(words, dict(os.environ), path).wait()
                    os.system(after)
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [path.with_suffix(suffix).read_text() for suffix in (".out", ".err")]
        return subprocess.CompletedProcess(words, status, *said)

    return run


def tmpfs(size: str, place: Path | str) -> str:
    return f"-t tmpfs -o size={size} tmpfs {place}"


def test_full_disk_costs_the_checkpoints_that_find_no_room(on: Run, tmp_path: Path) -> None:
    keep = f"cp -r {tmp_path}/default {tmp_path}-kept"
    result = on(tmpfs("620k", tmp_path), "train.py", *WORDS, f"output_dir={tmp_path}", after=keep)
    assert result.returncode == 0, result.stderr
    assert "was not written: " in result.stderr
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(Path(f"{tmp_path}-kept").glob("*/results.json"))


def test_data_workers_without_shared_memory(on: Run, tmp_path: Path) -> None:
    words = ("train.py", *WORDS, f"output_dir={tmp_path}", "data.num_workers=1")
    result = on(tmpfs("100k", "/dev/shm"), *words, "data.batch_size=1024")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.count("/dev/shm") == 1
    assert "docker run --shm-size" in result.stderr
    assert "data.num_workers" in result.stderr
