"""Logs are cut back to a checkpoint: no step is missing, none is there twice, no loss is silent."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.loggers.rewind import Logs
from tests.loggers.logged_run import END, attempt, curves


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("whole")
    attempt(run_dir, END)
    return run_dir


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was killed twice, and the record of its last checkpoint, of step 40."""
    run_dir = tmp_path_factory.mktemp("killed")
    return run_dir, attempt(run_dir, 40, attempt(run_dir, 20), 20)


def table(run_dir: Path) -> bytes:
    return (run_dir / "metrics.csv").read_bytes()


def test_killed_run_logs_what_the_whole_one_does(killed, whole, tmp_path: Path, caplog) -> None:
    run_dir = shutil.copytree(killed[0], tmp_path / "copy")
    assert table(run_dir) != table(whole)
    assert curves(run_dir) != curves(whole)
    attempt(run_dir, END, killed[1], 40)
    assert table(run_dir) == table(whole)
    assert curves(run_dir) == curves(whole)
    assert caplog.messages == []


def test_resume_from_an_earlier_checkpoint_takes_out_later_attempts(whole, tmp_path: Path) -> None:
    record = attempt(tmp_path, 20)
    attempt(tmp_path, 40, record, 20)
    attempt(tmp_path, END, record, 20)  # the checkpoint of step 40 was damaged
    assert table(tmp_path) == table(whole)
    assert curves(tmp_path) == curves(whole)


def test_start_that_came_to_no_checkpoint_leaves_no_logs(killed, tmp_path: Path) -> None:
    run_dir = shutil.copytree(killed[0], tmp_path / "copy")
    Logs(run_dir).rewind()
    assert [path for path in run_dir.rglob("*") if path.is_file()] == []
    Logs(run_dir).rewind()


def test_lost_logs_are_told_and_what_is_left_is_kept(killed, whole, tmp_path: Path, caplog) -> None:
    def cut(path: Path) -> None:
        os.truncate(path, path.read_bytes().index(b"\r\n30,") + 2)

    for name, damage, says in (
        ("metrics.csv", Path.unlink, "has lost rows: 0 of 40 are left"),
        ("metrics.csv", cut, "has lost rows: 30 of 40 are left"),
        ("tensorboard/events*", Path.unlink, "is not there, nor are the curves in it"),
        ("tensorboard/events*", lambda path: os.truncate(path, 500), "has lost "),
    ):
        caplog.clear()
        run_dir = shutil.copytree(killed[0], tmp_path / says)
        damage(min(run_dir.glob(name)))
        attempt(run_dir, END, killed[1], 40)
        assert len(caplog.messages) == 1
        assert says in caplog.text
        if name == "metrics.csv":
            assert curves(run_dir) == curves(whole)
            steps = [line.partition(b",")[0] for line in table(run_dir).splitlines()]
            num_left = int(says.split()[3])
            expected = [*range(num_left), *range(40, END)]
            assert steps == [b"step", *(str(step).encode() for step in expected)]
        else:
            assert table(run_dir) == table(whole)
            left = curves(run_dir)["tensorboard/train/loss"]
            assert set(left) < set(curves(whole)["tensorboard/train/loss"])
