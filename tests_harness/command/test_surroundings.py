"""A run starts and goes on whatever surrounds its command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests_harness.conftest import ROOT

pytestmark = pytest.mark.slow
WORDS = (
    "data=synthetic",
    "model=mlp",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "callbacks.confusion_matrix=null",
    "callbacks.worst_mistakes=null",
    "checkpoint.every_n_steps=3",
    "resume=auto",
)
NOWHERE = {"HOME": "/dev/null/home", "TMPDIR": "/dev/null/tmp"}  # which not even root can make
TOKYO, LOS_ANGELES = {"TZ": "Asia/Tokyo"}, {"TZ": "America/Los_Angeles"}


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


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (NOWHERE, NOWHERE, "no home"),
        (TOKYO, LOS_ANGELES, "time zones"),
        ({}, {}, "a b=c,d ü'q\"[x]{y}#%s"),
    ],
)
def test_run_goes_on(
    before: dict[str, str], after: dict[str, str], name: str, tmp_path: Path
) -> None:
    """Also with workers, and on several processes, in a relative folder."""
    folder = tmp_path / name
    folder.mkdir()
    first = started(folder, "strategy=cpu", "trainer.max_epochs=1", "output_dir=o", env=before)
    said = first.communicate(timeout=200)[0]
    assert first.returncode == 0, said
    ddp = ("strategy=ddp", "trainer.devices=2", "data.num_workers=1")
    then = started(folder, *ddp, "trainer.max_epochs=2", "output_dir=o", env=after)
    said = then.communicate(timeout=200)[0]
    assert then.returncode == 0, said
    assert "goes on from" in said
    assert len(list((folder / "o" / "default").iterdir())) == 1


def test_commands_at_once_leave_whole_runs_and_refusals(tmp_path: Path) -> None:
    """Who is first computes; another one is refused, or has made a folder of its own."""
    commands = [started(tmp_path, "strategy=cpu", "trainer.max_epochs=1") for _ in range(6)]
    said = [each.communicate(timeout=500)[0] for each in commands]
    computed = ["results.json" in text for text in said]
    refused = ["is alive" in text or "has finished" in text for text in said]
    assert all(one or other for one, other in zip(computed, refused, strict=True)), said
    runs = list((tmp_path / "outputs" / "default").iterdir())
    assert len(runs) == sum(computed)
    assert len({(run / "results.json").read_bytes() for run in runs}) == 1
    assert all("Traceback" not in text for text in said)
