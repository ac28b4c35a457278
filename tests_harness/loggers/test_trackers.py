"""Runs in W&B, MLflow and Trackio, as far as they are installed: killed, gone on, read back."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from omegaconf import OmegaConf

from harness.loggers import metrics_table
from harness.loggers.mirror import Mirror
from tests_harness.conftest import ROOT, command

TRACKERS = ("wandb", "mlflow", "trackio")
INSTALLED = [name for name in TRACKERS if find_spec(name)]
WORDS = (
    *("model=mlp", "strategy=cpu", "trainer.enable_progress_bar=false", "trainer.max_epochs=4"),
    *("checkpoint.every_n_steps=5", "trainer.log_every_n_steps=2", "resume=auto", "name=mine"),
    *("tags=[first,lr]", "notes=why", "callbacks.throughput=null"),
    f"+callbacks.kill._target_={__name__}.Kill",
)

each = pytest.mark.parametrize(
    "tracker",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in INSTALLED, reason=name))
        for name in TRACKERS
    ],
)


class Kill(pl.Callback):
    """Kill the process, as the system does, after the step that the environment names.

    Or, at step -2, when the training and its test are over and the trackers are to be closed.
    """

    def setup(self, *_: Any, **__: Any) -> None:
        if os.environ.get("KILL_AT") == "-2":
            Mirror.close = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == int(os.environ.get("KILL_AT", -1)):
            time.sleep(1)  # what was committed is sent meanwhile
            os.kill(os.getpid(), signal.SIGKILL)


def start(out: Path, *words: str, kill_at: int = -1) -> None:
    logger = f"logger=[{','.join(INSTALLED)}]"
    environment = {"KILL_AT": str(kill_at), "PYTHONPATH": str(ROOT)}
    done = command("train.py", *WORDS, logger, f"output_dir={out}", *words, environment=environment)
    assert done.returncode == (0 if kill_at == -1 else -signal.SIGKILL), done.stderr
    assert "has failed, and the run goes on" not in done.stderr


def folder_of(out: Path) -> Path:
    (run_dir,) = (out / "mine").iterdir()
    return run_dir


def read(tracker: str, out: Path) -> dict[str, Any]:
    """What a tracker has."""
    program = Path(__file__).with_name("read_tracker.py")
    found = command(program, tracker, out, folder_of(out), "mine")
    assert found.returncode == 0, found.stderr
    known: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return known


def points(run_dir: Path) -> dict[str, list[list[float]]]:
    """Those of the table."""
    found: dict[str, list[list[float]]] = {}
    for row in metrics_table.read(run_dir / "metrics.csv"):
        step = row.pop("step")
        for name, value in row.items():
            found.setdefault(name, []).append([step, value])
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a run that was killed three times, each time between two checkpoints."""
    if not INSTALLED:
        pytest.skip("no tracker is installed")
    out = tmp_path_factory.mktemp("outputs")
    for step in (3, 33, 48):
        start(out, kill_at=step)
    start(out)
    return out


@each
def test_run_that_was_killed_is_one_run_with_the_points_of_its_table(
    tracker: str, killed: Path
) -> None:
    known = read(tracker, killed)
    assert known["num_runs"] == 1
    assert known["points"] == points(folder_of(killed))
    assert known["id"] == (folder_of(killed) / "tracker_id").read_text()
    assert sorted(known["pictures"]) == ["test/confusion_matrix", "test/worst_mistakes"]
    assert known.get("status", "FINISHED") == "FINISHED"


@each
def test_tracker_has_the_whole_config_with_tags_and_notes(tracker: str, killed: Path) -> None:
    known = read(tracker, killed)
    config: Any = OmegaConf.to_container(OmegaConf.load(folder_of(killed) / "config.yaml"))
    assert known["config"].keys() >= config.keys()
    for part in ("optimizer", "net"):
        assert known["config"]["model"][part].keys() == config["model"][part].keys()
    assert known["config"]["trainer"] == config["trainer"]
    assert sorted(known["tags"]) == ["first", "lr"]
    assert known["notes"] == "why"
    assert not known["num_models"]


@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_longer_run_takes_the_points_of_its_first_end_back(killed: Path, tmp_path: Path) -> None:
    """The test of the first end is no longer in the table; the best checkpoint is asked for."""
    out = tmp_path / "outputs"
    shutil.copytree(killed, out)
    start(out, "trainer.max_epochs=5", *(f"logger.{name}.log_model=true" for name in INSTALLED))
    for tracker in INSTALLED:
        known = read(tracker, out)
        assert known["num_runs"] == 1, tracker
        assert known["points"] == points(folder_of(out)), tracker
        assert known["num_models"], tracker


@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_runs_in_another_place_go_on_there(killed: Path, tmp_path: Path) -> None:
    """Moved or copied with what the trackers have of them: the first place stays as it is."""
    out = tmp_path / "outputs"
    shutil.copytree(killed, out, symlinks=True)
    words = (f"resume={folder_of(out)}", "trainer.max_epochs=5")
    done = command("train.py", *words, environment={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for tracker in INSTALLED:
        for place in (out, killed):
            assert read(tracker, place)["points"] == points(folder_of(place)), (tracker, place)


@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_two_processes_are_one_run(tmp_path: Path) -> None:
    start(tmp_path, "strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu")
    for tracker in INSTALLED:
        known = read(tracker, tmp_path)
        assert known["num_runs"] == 1, tracker
        assert known["points"] == points(folder_of(tmp_path)), tracker


@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_run_gets_its_tracker_later(tmp_path: Path) -> None:
    """All that it has logged before goes there as well."""
    start(tmp_path, "logger=default", kill_at=33)
    start(tmp_path)
    for tracker in INSTALLED:
        assert read(tracker, tmp_path)["points"] == points(folder_of(tmp_path)), tracker


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
@pytest.mark.timeout(1800)
def test_twenty_kills_at_any_moment_leave_one_run(tmp_path: Path) -> None:
    """In the imports, while a tracker opens, between steps, in a checkpoint, in the test."""
    chance = random.Random(0)
    words = [sys.executable, "train.py", *WORDS, f"logger=[{','.join(INSTALLED)}]"]
    words += [f"output_dir={tmp_path}", "trainer.max_epochs=40"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(20):
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(3 + 12 * chance.random())
        process.kill()
        process.wait()
    start(tmp_path, "trainer.max_epochs=40")
    for tracker in INSTALLED:
        known = read(tracker, tmp_path)
        assert known["num_runs"] == 1, tracker
        assert known["points"] == points(folder_of(tmp_path)), tracker


@pytest.mark.skipif(not INSTALLED, reason="no tracker is installed")
def test_run_that_is_killed_while_its_trackers_open_goes_on(tmp_path: Path) -> None:
    """Its training is over by then, and what it has learnt is in no tracker yet."""
    start(tmp_path, kill_at=-2)
    assert not (folder_of(tmp_path) / "results.json").exists()
    start(tmp_path)
    for tracker in INSTALLED:
        known = read(tracker, tmp_path)
        assert known["num_runs"] == 1, tracker
        assert known["points"] == points(folder_of(tmp_path)), tracker
