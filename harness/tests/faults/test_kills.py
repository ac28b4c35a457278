"""A kill or a signal costs only the steps since the last checkpoint."""

import os
import random
import signal
from pathlib import Path

import pytest

from harness import convert, evaluate, load_run, predict
from harness.checkpoints.reading import newest_intact
from tests.faults.real_modules import CONFIGURATIONS, DDP
from tests.faults.storm import Run, storm, wait_until

LONG = [
    *("data=synthetic", "model=mlp", "data.batch_size=100", "trainer.max_epochs=1"),
    *("trainer.val_check_interval=5", "trainer.enable_progress_bar=false"),
    *("checkpoint.every_n_steps=4", *DDP, "trainer.accelerator=cpu"),
]


def test_killed_run_ends_equal_by_bit_and_is_evaluated_predicted_and_converted(
    tmp_path: Path,
) -> None:
    name = "bf16-mixed, workers"
    reference, killed = Run.of(name, tmp_path / "reference"), Run.of(name, tmp_path / "run")
    reference.finish()
    killed.end(killed.begin(4), signal.SIGKILL)
    killed.finish()
    assert killed.differences(reference) == []
    run = load_run(killed.run_dir())
    assert "Resuming from" in (run.folder / "run.log").read_text()
    again = evaluate(run.checkpoint, "trainer.enable_progress_bar=false").results
    assert again["test/loss"] == pytest.approx(run.results["test/loss"])
    assert predict(run.checkpoint, f"output={tmp_path / 'out.csv'}").read_text().count("\n") > 10
    report = convert.convert(run.checkpoint, tmp_path / "weights.pt")
    assert report.tensors


@pytest.mark.ci
def test_two_processes_all_leave_whatever_strikes_and_the_run_ends_equal_by_bit(
    tmp_path: Path,
) -> None:
    name = "every kind of log and metric, ddp"
    reference, run = Run.of(name, tmp_path / "reference"), Run.of(name, tmp_path / "run")
    reference.finish()
    for signum, rank, status, said in (
        (signal.SIGKILL, None, -signal.SIGKILL, ""),
        (signal.SIGKILL, 1, 1, "The process of rank 1 has ended"),
        (signal.SIGTERM, 1, 128 + signal.SIGTERM, "SIGTERM: saved step"),
        (signal.SIGINT, None, 128 + signal.SIGINT, "SIGINT: saved step"),
    ):
        process = run.begin(4)
        assert run.end(process, signum, run.pid_of(rank) if rank else 0) == status, (signum, rank)
        assert said in run.log.read_text()
    run.finish()
    assert run.differences(reference) == []


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "saved"), [("validation", "step_4"), ("test", "step_13")])
def test_signal_in_a_long_validation_or_test_is_answered_and_costs_no_more_than_a_kill(
    moment: str, saved: str, tmp_path: Path
) -> None:
    """Of 5 and 13 steps, of which every fourth is saved, and the last."""
    run = Run(tmp_path, LONG, f"+callbacks.trace.seconds_per_{moment}=30")
    process = run.begin()
    wait_until((tmp_path / "trace" / f"{moment}_1").exists)
    assert run.end(process, signal.SIGTERM, run.pid_of(1)) == 128 + signal.SIGTERM
    newest, _ = newest_intact(run.run_dir() / "checkpoints")
    assert newest is not None
    assert newest.stem == saved


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_storm_of_kills_on_a_real_module_loses_nothing(name: str, tmp_path: Path) -> None:
    """More of them: ``STORM=100``, kills of each module, and ``-s`` shows what came of them."""
    outcome = storm(name, tmp_path, random.Random(name), int(os.environ.get("STORM", "1")))
    print(f"{name}: {dict(outcome)}")
    assert outcome.total() > 0
