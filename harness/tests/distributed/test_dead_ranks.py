"""A rank that fails or dies ends the whole run of one machine, with one message."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import ci, slow
from tests.faults.fork_server import command
from tests.workers.disturb import disturb

DDP = (
    *("strategy=ddp", "trainer.devices=3", "trainer.accelerator=cpu", "data=synthetic"),
    *("model=mlp", "trainer.max_epochs=1", "trainer.enable_progress_bar=false"),
)
DIED = r"The process of rank {} has ended \({}\), so the run ends as well"


@pytest.mark.parametrize(
    ("what", "rank", "says"),
    [
        ("error", "0", r"disturb.py:\d+ .*of a mistake"),
        *ci(("error", "2", r"Rank 2: .*disturb.py:\d+ .*of a mistake")),
        ("kill", "2", DIED.format(2, "SIGKILL")),
        *slow(("error", "null", r"disturb.py:\d+ .*of a mistake")),
    ],
)
def test_end_of_a_rank_is_told_once_and_ends_the_run(
    what: str, rank: str, says: str, tmp_path: Path
) -> None:
    words = (*DDP, *disturb(what=what, rank=rank))
    result = command("train.py", *words, f"output_dir={tmp_path}", timeout=120)
    screen = result.stdout + result.stderr
    assert result.returncode == 1, screen
    assert re.search(says, screen), screen
    assert screen.count("of a mistake") == (what == "error"), screen
    assert "Traceback" not in screen
    assert screen.count("has ended") == (what == "kill"), screen
    (record,) = tmp_path.glob("default/*/record.json")
    assert json.loads(record.read_text())["status"] != "finished"
