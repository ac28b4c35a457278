"""Logs are cut back to a checkpoint: no step is missing, none is there twice."""

from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from harness.loggers.metrics_table import MetricsTable
from harness.loggers.rewind import rewind_events, rewind_table
from tests_harness.faults.run_folder import curves


def test_table_keeps_the_rows_before_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n0,3.5\n9,2.5\n10,1.5\n1")  # the last row was cut off
    rewind_table(path, 10)
    assert path.read_text().splitlines() == ["step,loss", "0,3.5", "9,2.5"]
    table = MetricsTable(path)
    table.log_metrics({"loss": 1.5}, 10)
    table.finalize("success")
    assert path.read_text().splitlines()[-1] == "10,1.5"


@pytest.mark.parametrize(
    "tail", [b"\0\0\0\0\n", b"7,\xff\xfe\n8,1,2\n,\n", b"junk\n10,1.0\n-3,1.0\n"]
)
def test_damaged_rows_are_taken_out(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"step,loss\r\n0,3.5\r\n" + tail)
    rewind_table(path, 7)
    assert path.read_text().splitlines() == ["step,loss", "0,3.5"]


def test_table_that_has_lost_its_columns_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes(b"\0" * 100 + b"\n")
    rewind_table(tmp_path / "metrics.csv", 7)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv.damaged"]


@pytest.mark.parametrize(
    "tail", [b"\0" * 4096, b"\xff" * 100, bytes(range(256)), b"\5" + b"\0" * 30]
)
def test_curves_with_a_damaged_tail_are_cut_before_it(tail: bytes, tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    for step in range(6):
        writer.add_scalar("loss", 0.5 * step, step)
    writer.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    rewind_events(tmp_path, 8)
    assert path.read_bytes() == whole


def test_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """A run opens its own before it knows where it goes on."""
    for steps in (range(0, 6), range(0)):
        writer = SummaryWriter(str(tmp_path), filename_suffix=f".{len(steps)}")
        for step in steps:
            writer.add_scalar("loss", 0.5 * step, step)
        writer.flush()
    (mine,) = tmp_path.glob("*.0")
    before = mine.read_bytes()
    rewind_events(tmp_path, 0)
    assert mine.read_bytes() == before
    assert curves(tmp_path) == []


def test_curves_end_before_the_step_in_all_files(tmp_path: Path) -> None:
    for steps in (range(0, 6), range(6, 12)):
        writer = SummaryWriter(str(tmp_path))
        for step in steps:
            writer.add_scalar("loss", 0.5 * step, step)
        writer.close()
    newest = max(tmp_path.iterdir(), key=lambda path: (path.name[:30], int(path.suffix[1:])))
    newest.write_bytes(newest.read_bytes()[:-3])  # as a killed process leaves it
    rewind_events(tmp_path, 8)
    assert [step for step, _, _ in curves(tmp_path)] == list(range(8))
    rewind_events(tmp_path, 3)
    assert [step for step, _, _ in curves(tmp_path)] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 1


def test_no_logs_are_no_trouble(tmp_path: Path) -> None:
    rewind_table(tmp_path / "metrics.csv", 0)
    rewind_events(tmp_path / "tensorboard", 0)
    assert list(tmp_path.iterdir()) == []
