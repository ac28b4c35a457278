"""Further processes import beside the first one, and do nothing before it tells them to."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from harness.processes import early
from harness.strategies.launchable import num_further
from harness.testing import command
from tests.conftest import ROOT

DDP = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "data=synthetic"]
WAITER = "from harness.processes import early; early.wait(); import os; print(os.environ['PORT'])"
# A network that notes when it is built.
NOTING = """
import os, time
from pathlib import Path
from small.models import MLP

class Net(MLP):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        rank = os.environ.get("LOCAL_RANK", "0")
        Path(os.environ["NOTES"], rank).write_text(repr(os.environ.get("MASTER_PORT")))
"""


def waiter() -> "subprocess.Popen[Any]":
    env = os.environ | {early.WAITS: "1", "LOCAL_RANK": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", WAITER], cwd=ROOT, env=env, stdin=-1, stdout=-1, stderr=-1
    )


@pytest.fixture
def noting(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "noting.py").write_text(NOTING)
    return {"PYTHONPATH": str(tmp_path), "NOTES": str(tmp_path)}


def test_process_takes_the_environment_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    process = waiter()
    monkeypatch.setitem(early.started, "1", process)
    taken = early.take(["no", "such", "program"], {"LOCAL_RANK": "1", "PORT": "29400"})
    assert taken is process
    process.stdin = None  # closed
    assert process.communicate(timeout=60) == (b"29400\n", b"")


def test_process_leaves_where_the_first_one_has_ended() -> None:
    assert waiter().communicate(timeout=60) == (b"", b"")


def test_early_processes_are_the_run(noting: dict[str, str], tmp_path: Path) -> None:
    words = [*DDP, "model=mlp", "model.net._target_=noting.Net", "trainer.max_epochs=1"]
    result = command("train.py", *words, f"output_dir={tmp_path / 'out'}", environment=noting)
    assert result.returncode == 0, result.stderr
    # Lightning gives the port to those that it starts; one that it had started itself would have
    # been built with it as well, so the processes that were started are counted.
    assert json.loads((tmp_path / "1").read_text().replace("'", '"')).isdigit()
    (record,) = (tmp_path / "out").glob("default/*/record.json")
    assert json.loads(record.read_text())["starts"][0]["num_processes"] == 2


def test_as_many_are_started_as_lightning_would_start() -> None:
    for words, number in (
        ({"strategy": "ddp", "devices": 3}, 2),
        ({"strategy": "ddp", "devices": [0, 1], "num_nodes": 2}, 1),
        ({"strategy": "ddp", "devices": 1}, 0),
        ({"strategy": "ddp_spawn", "devices": 2}, 0),
        ({"strategy": {"_target_": "x.DDP2Strategy"}, "devices": 2, "num_nodes": 2}, 0),
        ({"strategy": {"_target_": "x.DataParallelStrategy"}, "devices": 2}, 0),
        ({"strategy": "auto", "devices": 1}, 0),
    ):
        trainer = OmegaConf.create({"num_nodes": 1, "accelerator": "cpu"} | words)
        assert num_further(trainer) == number, words


@pytest.mark.parametrize(
    "environment",
    [{"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}, {"LOCAL_RANK": "0"}],
)
def test_launchers_start_their_own(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: begun.append(args))
    monkeypatch.setattr(early, "started", {})
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.delitem(sys.modules, "torch")
    early.start("train", 1)
    assert begun == [([sys.executable, str(ROOT / "train.py")],)]
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", sys.__spec__)  # python -m
    early.start("train", 1)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    early.start("train", 1)
    assert len(begun) == 1
