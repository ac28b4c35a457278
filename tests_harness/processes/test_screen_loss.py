"""A screen that has gone costs no run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests_harness.conftest import ROOT

WORDS = (
    "train.py",
    "data=synthetic",
    "model=mlp",
    "trainer.max_epochs=1",
    "trainer.accelerator=cpu",
)


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "default").iterdir()
    return found


def test_run_goes_on_when_its_reader_has_gone(tmp_path: Path) -> None:
    """``train.py | head -1``."""
    with subprocess.Popen(
        [sys.executable, *WORDS, f"output_dir={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(300) == 0
    assert (run_dir(tmp_path) / "results.json").exists()
    assert "goes on without its screen: Broken pipe" in (run_dir(tmp_path) / "run.log").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_run_goes_on_when_there_is_no_room_for_what_it_prints(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, *WORDS, f"output_dir={tmp_path}"]
        status = subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, check=False).returncode
    assert status == 0
    assert (run_dir(tmp_path) / "results.json").exists()
