"""Logs are cut back to a checkpoint: no step is missing, none is there twice, no loss is silent."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.loggers.rewind import Logs
from harness.runs.reading import read_table
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


def test_name_in_a_checkpoint_leads_nowhere_else(killed, tmp_path: Path) -> None:
    run_dir = shutil.copytree(killed[0], tmp_path / "run")
    (tmp_path / "other").write_text("mine")
    Logs(run_dir).rewind(killed[1] | {"events": {"../../other": 2}})
    assert (tmp_path / "other").read_text() == "mine"


DAMAGE: dict[str, tuple[Callable[[bytes], bytes | None], int]] = {  # and the rows that it leaves
    "deleted": (lambda data: None, 0),
    "emptied": (lambda data: b"", 0),
    "no header": (lambda data: data.partition(b"\r\n")[2], 0),
    "cut": (lambda data: data[: data.index(b"\r\n30,") + 6], 30),
    "a row of another": (lambda data: data.replace(b"\r\n7,", b"\r\n1,2\r\n7,"), 39),
}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a table, each without the columns that it leaves empty."""
    rows = read_table(path).rows(named=True)
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_damaged_table_costs_its_rows_and_one_line(killed, whole, tmp_path: Path, caplog) -> None:
    expected = rows_of(whole / "metrics.csv")
    for nth, (change, num_left) in enumerate(DAMAGE.values()):
        caplog.clear()
        run_dir = shutil.copytree(killed[0], tmp_path / str(nth))
        damaged, path = change(table(run_dir)), run_dir / "metrics.csv"
        path.unlink() if damaged is None else path.write_bytes(damaged)
        attempt(run_dir, END, killed[1], 40)
        rows = rows_of(path)
        assert len(rows) == num_left + END - 40
        assert all(repr(row) in map(repr, expected) for row in rows)
        assert len(caplog.messages) == (num_left < 40)
        if num_left < 40:
            assert f"{num_left} of its 40 rows before the checkpoint are left" in caplog.text
            assert damaged is None or path.with_name("metrics.csv.damaged").read_bytes() == damaged


def test_damaged_curves_are_told_in_one_line(killed, whole, tmp_path: Path, caplog) -> None:
    for damage in (Path.unlink, lambda path: os.truncate(path, 500)):
        caplog.clear()
        run_dir = shutil.copytree(killed[0], tmp_path / damage.__name__)
        damage(min(run_dir.glob("tensorboard/events*")))
        attempt(run_dir, END, killed[1], 40)
        assert len(caplog.messages) == 1
        assert "bytes of its curves" in caplog.text
        assert table(run_dir) == table(whole)
        found = curves(run_dir)["tensorboard/train/loss"]
        assert set(found) < set(curves(whole)["tensorboard/train/loss"])
