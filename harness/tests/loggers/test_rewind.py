"""Logs are cut back to a checkpoint: no step is missing, none is there twice, no loss is silent."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.loggers.metrics_table import MetricsTable
from harness.loggers.rewind import EMPTY, Logs
from harness.loggers.tensorboard import TensorBoard

END = 60  # steps


def attempt(run_dir: Path, last: int, record: Any = EMPTY, first: int = 0) -> Any:
    """One process: resume from a record, log the steps up to ``last``, and return a record.

    Unless it ends the run, it logs ten more steps, as a process that is killed does.
    """
    logs = Logs(run_dir)
    loggers = [MetricsTable(run_dir / "metrics.csv"), TensorBoard(run_dir, "", "tensorboard")]
    loggers[1].experiment.flush()  # opens its file
    logs.rewind(record)
    for logger in loggers:
        for step in range(first, last):
            log_step(logger, step)
        logger.write_all()
    record = logs.record()
    for logger in loggers:
        for step in range(last, min(last + 10, END)):
            log_step(logger, step)
        logger.finalize("success")
    return record


def log_step(logger: Any, step: int) -> None:
    logger.log_metrics({"lr": 0.001 * (1 + step // 20)}, step)
    logger.log_metrics({"train/loss": math.exp(-step / 7), "epoch": step // 10}, step)
    if step % 10 == 9:
        accuracy = step / 61 if step < 50 else math.nan
        logger.log_metrics({"val/accuracy": accuracy}, step)
    if step == 45:  # a column that only a killed process may have
        logger.log_metrics({"late": 1.0}, step)
    if isinstance(logger, TensorBoard):
        logger.experiment.add_histogram("weights", np.arange(step + 1), step)
        logger.experiment.add_scalar("by_sample", 0.5, step * 64)  # steps of another kind
        logger.experiment.add_scalars("pair", {"left": 0.5}, step)  # a file in a folder below


def curves(run_dir: Path) -> dict[str, list[tuple[int, str]]]:
    """What TensorBoard shows, by its own reader; files of one second are in no order."""
    found: dict[str, list[tuple[int, str]]] = {}
    for folder in [run_dir / "tensorboard", *run_dir.glob("tensorboard/*/")]:
        reader = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
        reader.Reload()
        for tag in reader.Tags()["scalars"]:
            points = [(event.step, str(event.value)) for event in reader.Scalars(tag)]
            found[f"{folder.name}/{tag}"] = sorted(points)
        for tag in reader.Tags()["histograms"]:
            found[tag] = sorted((event.step, "") for event in reader.Histograms(tag))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    run_dir = tmp_path_factory.mktemp("whole")
    attempt(run_dir, END)
    return run_dir


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that was killed twice, and the records of its checkpoints, by their steps."""
    run_dir = tmp_path_factory.mktemp("killed")
    first = attempt(run_dir, 20)
    return run_dir, {20: first, 40: attempt(run_dir, 40, first, 20)}


def table(run_dir: Path) -> bytes:
    return (run_dir / "metrics.csv").read_bytes()


@pytest.mark.parametrize("step", [40, 20])  # where the checkpoint of step 40 is damaged
def test_killed_run_logs_what_the_whole_one_does(
    step: int, killed, whole, tmp_path: Path, caplog
) -> None:
    run_dir = shutil.copytree(killed[0], tmp_path / "copy")
    assert table(run_dir) != table(whole)
    assert curves(run_dir) != curves(whole)
    attempt(run_dir, END, killed[1][step], step)
    assert table(run_dir) == table(whole)
    assert curves(run_dir) == curves(whole)
    assert caplog.messages == []


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
        ("tensorboard/events*", Path.unlink, "does not exist, so its curves are lost"),
        ("tensorboard/events*", lambda path: os.truncate(path, 500), "has lost "),
    ):
        caplog.clear()
        run_dir = shutil.copytree(killed[0], tmp_path / says)
        damage(min(run_dir.glob(name)))
        attempt(run_dir, END, killed[1][40], 40)
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
