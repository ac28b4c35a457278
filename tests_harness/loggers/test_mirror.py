"""What is sent to a tracker, and when; by a tracker that is a list."""

import logging
import math
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import UserError
from harness.command.compose import compose_command
from harness.loggers import mirror
from harness.loggers.metrics_table import MetricsTable
from harness.loggers.mirror import Label, Mirror, tell_mirrors
from harness.loggers.rewind import Logs
from harness.loggers.rows import Row, is_beginning, values_in
from harness.loggers.tensorboard import TensorBoard
from tests_harness.conftest import ROOT


class Tracker(Mirror):
    """Keeps what it gets in a list that outlives the process."""

    package = "json"  # which is installed
    name = version = "tracker"
    experiment = None

    def __init__(self, run_dir: Path, kept: list[Row]) -> None:
        self.prepare(run_dir)
        self.kept, self.pictures, self.ended = kept, [], ""
        self.errors: list[Exception] = []
        self.answers = threading.Event()
        self.answers.set()

    def begin(self) -> None:
        self.answers.wait()
        if self.errors:
            raise self.errors.pop()

    def held(self, rows: Sequence[Row]) -> Counter[str]:
        if not is_beginning(self.kept, rows):
            self.kept.clear()
        return values_in(self.kept)

    def send(self, rows: Sequence[Row]) -> None:
        self.kept += rows

    def show(self, name: str, step: int, png: bytes) -> None:
        self.pictures.append((name, step))

    def end(self, status: str) -> None:
        self.ended = status


def attempt(run_dir: Path, kept: list[Row], first: int, last: int, record: Any) -> Any:
    """One process: logs steps, has a checkpoint at ``last``, logs three more, and is killed."""
    logs, tracker, table = (
        Logs(run_dir),
        Tracker(run_dir, kept),
        MetricsTable(run_dir / "metrics.csv"),
    )
    if record is not None:
        logs.rewind(record, first)
    logs.begin([table, tracker])
    for step in range(first, last):
        table.log_metrics({"loss": 1 / (1 + step)}, step)
    table.write_all()
    record, committed = logs.record(), logs.telling_mirrors()
    for step in range(last, last + 3):
        table.log_metrics({"loss": -1.0}, step)
    table.write_all()
    committed()
    assert tracker.outbox is not None
    assert tracker.thread is not None
    tracker.outbox.put((tracker.known, ""))  # lets the thread end
    tracker.thread.join(10)
    return {"events": record["events"], "table": {k: list(v) for k, v in record["table"].items()}}


def test_nothing_is_sent_that_no_checkpoint_stands_behind(tmp_path: Path) -> None:
    kept: list[Row] = []
    record = attempt(tmp_path, kept, 0, 10, None)
    # As a checkpoint has kept it, before three more rows came.
    record["table"]["rows"] = record["table"]["rows"][:10]
    assert [step for step, _ in kept] == list(range(10))
    attempt(tmp_path, kept, 10, 20, record)
    assert kept == [(step, {"loss": 1 / (1 + step)}) for step in range(20)]


def test_points_that_the_run_has_no_longer_are_taken_back(tmp_path: Path) -> None:
    kept: list[Row] = [(0, {"loss": 1.0}), (1, {"loss": 7.0})]
    attempt(tmp_path, kept, 0, 3, None)
    assert kept == [(step, {"loss": 1 / (1 + step)}) for step in range(3)]


def test_not_a_number_and_infinity_are_known_again() -> None:
    rows: list[Row] = [(0, {"a": math.nan, "b": math.inf}), (1, {"a": -math.inf})]
    assert is_beginning([(0, {"a": math.nan}), (0, {"b": 1.7976931348623157e308})], rows)
    assert not is_beginning([(0, {"a": 0.0})], rows)


def test_tracker_that_fails_gets_all_of_it_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Row] = []
    tracker, table = Tracker(tmp_path, kept), MetricsTable(tmp_path / "metrics.csv")
    tracker.errors = [ConnectionError("no route to host")]
    table.log_metrics({"loss": 1.0}, 0)
    table.write_all()
    logging.getLogger("harness").propagate = True
    with caplog.at_level(logging.WARNING, logger="harness"):
        tracker.commit(mirror.Known(0, {}))
        while tracker.errors:
            pass
        tracker.close("success")
    assert "json has failed, and the run goes on: no route to host" in caplog.text
    assert (kept, tracker.ended) == ([(0, {"loss": 1.0})], "success")


def test_tracker_that_does_not_answer_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(tmp_path, [])
    tracker.wait_seconds = 0.1
    tracker.answers.clear()
    logging.getLogger("harness").propagate = True
    with caplog.at_level(logging.WARNING, logger="harness"):
        tracker.close("success")
    assert "json has not taken everything within 0 s" in caplog.text
    tracker.answers.set()


def test_pictures_of_tensorboard_are_shown_once(tmp_path: Path) -> None:
    board, tracker = TensorBoard(tmp_path, "", "tensorboard"), Tracker(tmp_path, [])
    pixels = np.random.default_rng(0).integers(0, 255, (3, 32, 32), np.uint8)
    board.experiment.add_image("sample", pixels, 3)
    board.experiment.add_scalar("loss", 1.0, 3)
    board.experiment.flush()
    tracker.commit(mirror.EVERYTHING)
    board.experiment.add_image("sample", pixels, 4)
    board.experiment.flush()
    tracker.close("success")
    assert tracker.pictures == [("sample", 3), ("sample", 4)]


def test_id_of_a_run_stays(tmp_path: Path) -> None:
    assert Tracker(tmp_path, []).id == Tracker(tmp_path, []).id


def test_tracker_needs_the_table(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"override /logger: \[default, json\]"):
        tell_mirrors([Tracker(tmp_path, [])], compose_command("train", [], ROOT / "conf").cfg)


def test_tracker_that_is_not_installed_is_told(tmp_path: Path) -> None:
    class Gone(Tracker):
        package = "not_there"

    with pytest.raises(UserError, match=r"pip install -e '.\[not_there\]'"):
        Gone(tmp_path, [])
    assert Label().tags == []


@pytest.mark.parametrize(
    ("word", "loggers"),
    [
        ("logger=wandb", ["tensorboard", "csv", "wandb"]),
        ("logger=[mlflow,trackio]", ["tensorboard", "csv", "mlflow", "trackio"]),
        ("logger=[default,wandb]", ["tensorboard", "csv", "wandb"]),
        ("logger=default", ["tensorboard", "csv"]),
        ("logger=none", []),
    ],
)
def test_tracker_is_beside_the_default_loggers(word: str, loggers: list[str]) -> None:
    assert list(compose_command("train", [word], ROOT / "conf").cfg.logger) == loggers
