"""A run starts and goes on whatever surrounds its command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
WORDS = (
    "data=synthetic",
    "model=mlp",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "checkpoint.every_n_steps=3",
    "resume=auto",
)
NOWHERE = {"HOME": "/dev/null/home", "TMPDIR": "/dev/null/tmp"}  # which not even root can make


def started(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """The command, typed in a folder."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *WORDS, *words],
        cwd=folder,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_run_goes_on_without_a_home_in_another_time_zone_and_an_odd_folder(tmp_path: Path) -> None:
    """Also with workers, and on several processes, in a relative folder."""
    folder = tmp_path / "a b=c,d ü'q\"[x]{y}#%s"
    folder.mkdir()
    ddp = ("strategy=ddp", "trainer.devices=2", "data.num_workers=1", "trainer.max_epochs=2")
    for words, zone in (
        (("strategy=cpu", "trainer.max_epochs=1"), "Asia/Tokyo"),
        (ddp, "America/Los_Angeles"),
    ):
        run = started(folder, *words, "output_dir=o", env=NOWHERE | {"TZ": zone})
        said = run.communicate(timeout=200)[0]
        assert run.returncode == 0, said
    assert "goes on from" in said
    assert len(list((folder / "o" / "default").iterdir())) == 1
