"""Disks without room, without the right to write, and too small for data workers: sentences."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests_harness.conftest import ROOT, slow

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
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def on() -> Run:
    """Run a command where something is mounted that only it sees."""

    def run(
        mount: str, *arguments: str | Path, after: str = "true"
    ) -> subprocess.CompletedProcess[str]:
        text = f'mount {mount} && {{ {sys.executable} "$@"; status=$?; {after}; exit $status; }}'
        return subprocess.run(
            ["unshare", "-m", "sh", "-c", text, "sh", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def tmpfs(size: str, place: Path | str) -> str:
    return f"-t tmpfs -o size={size} tmpfs {place}"


@pytest.mark.slow
@pytest.mark.parametrize("size", ["8k", "48k", "300k"])
def test_full_disk_lets_training_go_on(size: str, on: Run, tmp_path: Path) -> None:
    """What finds no room, however much there is, is named; the results at the end need some."""
    result = on(tmpfs(size, tmp_path), "train.py", *WORDS, f"output_dir={tmp_path}")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "was not written: No space left on device" in result.stderr
    assert "Free space" in result.stderr.strip().splitlines()[-1]


def test_full_disk_costs_the_checkpoints_that_find_no_room(on: Run, tmp_path: Path) -> None:
    keep = f"cp -r {tmp_path}/default {tmp_path}-kept"
    result = on(tmpfs("620k", tmp_path), "train.py", *WORDS, f"output_dir={tmp_path}", after=keep)
    assert result.returncode == 0, result.stderr
    assert "ckpt was not written: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(Path(f"{tmp_path}-kept").glob("*/results.json"))


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(finished_run, folder, symlinks=True)
    return folder


def read_only(folder: Path) -> str:
    return f"--bind {folder} {folder} && mount -o remount,ro,bind {folder}"


def test_resume_where_nothing_may_be_written(on: Run, run_copy: Path) -> None:
    result = on(read_only(run_copy), "train.py", f"resume={run_copy}", "trainer.max_epochs=3")
    assert result.returncode == 1
    assert "Read-only file system" in result.stderr
    assert "Copy the run to a folder that you may write to" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("script", ["evaluate.py", "predict.py"])
def test_run_that_may_only_be_read_is_evaluated(
    script: str, on: Run, run_copy: Path, tmp_path: Path
) -> None:
    words = (script, f"checkpoint={run_copy}/checkpoints/best.ckpt")
    refused = on(read_only(run_copy), *words)
    assert refused.returncode == 1
    assert "output_dir=<folder>" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 2
    taken = on(read_only(run_copy), *words, f"output_dir={tmp_path}/elsewhere")
    assert taken.returncode == 0, taken.stderr
    assert len(list((tmp_path / "elsewhere").glob("*/*/[rp][er][se]*.[jc]s*"))) == 1


@pytest.mark.parametrize("size", ["100k", *slow("16k")])  # no room for semaphores; for a batch
def test_data_workers_without_shared_memory(size: str, on: Run, tmp_path: Path) -> None:
    words = ("train.py", *WORDS, f"output_dir={tmp_path}", "data.num_workers=1")
    result = on(tmpfs(size, "/dev/shm"), *words, "data.batch_size=1024")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.count("/dev/shm") == 1
    assert "docker run --shm-size" in result.stderr
    assert "data.num_workers" in result.stderr
