"""What a kill or a signal costs: nothing but the steps since the last checkpoint."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from harness import convert, evaluate, load_run, predict
from harness.checkpoints import lookup
from tests.faults import storm
from tests.faults.fast_command import start
from tests.faults.real_modules import CONFIGURATIONS

LONG = (
    *("data=synthetic", "model=mlp", "data.batch_size=100", "trainer.max_epochs=1"),
    *("trainer.val_check_interval=5", "trainer.enable_progress_bar=false"),
    *("strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"),
)
ALONE = "bf16-mixed, workers"
TWO = "every kind of log and metric, ddp"


def strike(name: str, folder: Path, signum: signal.Signals, rank: int | None = None) -> int:
    """Send a signal to a run that trains, or to one rank; the run's status when all have left."""
    process = storm.begin(name, folder)
    storm.wait_for_step(process, folder, storm.num_steps(folder) + 4)
    if rank is None:
        os.killpg(process.pid, signum)
    else:
        os.kill(storm.pid_of(folder, rank), signum)
    assert storm.is_over(process), (folder / "log").read_text()
    return process.wait()


def test_killed_run_ends_equal_by_bit_and_is_evaluated_predicted_and_converted(
    tmp_path: Path,
) -> None:
    assert storm.finish(ALONE, tmp_path / "reference") == ""
    strike(ALONE, tmp_path / "run", signal.SIGKILL)
    assert storm.finish(ALONE, tmp_path / "run") == ""
    assert storm.same_run(tmp_path / "run", tmp_path / "reference") == []
    run = load_run(storm.run_dir(tmp_path / "run"))
    assert "Going on from" in (run.folder / "run.log").read_text()
    again = evaluate(run.checkpoint, "trainer.enable_progress_bar=false").results
    assert again["test/loss"] == pytest.approx(run.results["test/loss"])
    assert predict(run.checkpoint, f"output={tmp_path / 'out.csv'}").read_text().count("\n") > 10
    report = convert.convert(run.checkpoint, tmp_path / "weights.pt")
    assert report.tensors


def test_two_processes_all_leave_whatever_strikes_and_the_run_ends_equal_by_bit(
    tmp_path: Path,
) -> None:
    reference, run = tmp_path / "reference", tmp_path / "run"
    assert storm.finish(TWO, reference) == ""
    for signum, rank, status, said in (
        (signal.SIGKILL, None, -signal.SIGKILL, ""),
        (signal.SIGKILL, 1, 1, "The process of rank 1 has ended"),
        (signal.SIGTERM, 1, 128 + signal.SIGTERM, "SIGTERM: saved step"),
        (signal.SIGINT, None, 128 + signal.SIGINT, "SIGINT: saved step"),
    ):
        assert strike(TWO, run, signum, rank) == status, (signum, rank)
        assert said in (run / "log").read_text()
    assert storm.finish(TWO, run) == ""
    assert storm.same_run(run, reference) == []


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "saved"), [("validation", "step_4"), ("test", "step_13")])
def test_signal_in_a_long_validation_or_test_loses_no_step(
    moment: str, saved: str, tmp_path: Path
) -> None:
    """Of 5 and 13 steps: what is left of a validation is done again."""
    slow_moment = f"+callbacks.trace.seconds_per_{moment}=30"
    process = start([*LONG, slow_moment, *storm.traced(tmp_path)], tmp_path / "log")
    end = time.monotonic() + 300
    while not (tmp_path / "trace" / f"{moment}_1").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(storm.pid_of(tmp_path, 1), signal.SIGTERM)
    assert storm.is_over(process), (tmp_path / "log").read_text()
    assert process.wait() == 128 + signal.SIGTERM
    newest, _ = lookup.newest_whole(storm.run_dir(tmp_path) / "checkpoints")
    assert newest is not None
    assert newest.stem == saved


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_storm_of_kills_on_a_real_module_loses_nothing(name: str, tmp_path: Path) -> None:
    """More of them: ``STORM=100``, kills of each module."""
    num = int(os.environ.get("STORM", "1"))
    outcome = storm.storm(name, tmp_path / "storm", random.Random(name), num)
    assert outcome == []
