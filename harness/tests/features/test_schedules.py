"""Learning rates over a run: what the choices of model/scheduler give."""

import csv
import math
from pathlib import Path

import pytest
import torch

from harness.command.compose import compose
from harness.errors import UserError
from harness.features.schedules import cosine
from tests.faults.resume_sweep import COMMON, train
from tests.faults.run_folder import leave_at


def rates(total_steps: int, **settings: float) -> list[list[float]]:
    """The rate of each of two groups in each step."""
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 0.1}])
    schedule = cosine(optimizer, total_steps, **settings)
    found = []
    for _ in range(total_steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def test_rates_rise_in_a_line_and_fall_along_half_a_cosine_to_their_final_share() -> None:
    expected = [0.5, 1.0] + [(1 + math.cos(math.pi * i / 8)) / 2 for i in range(8)]
    for warmup in (0.2, 2):
        assert [first for first, _ in rates(10, warmup=warmup)] == pytest.approx(expected)
    assert all(second == pytest.approx(first / 10) for first, second in rates(20))
    assert rates(1000, final=0.1)[-1][0] == pytest.approx(0.1, abs=1e-4)
    assert {first for first, _ in rates(10, warmup=0, final=1)} == {1.0}


def test_numbers_that_are_no_schedule_are_refused() -> None:
    for name, value in (("warmup", -1), ("warmup", 2.5), ("warmup", 10), ("final", 1.5)):
        with pytest.raises(UserError, match=rf"model.scheduler.{name}="):
            rates(10, **{name: value})


def logged_rates(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open() as file:
        return [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row.get("lr-AdamW")]


def test_plateau_looks_at_the_objective_after_each_epoch(tmp_path: Path) -> None:
    never_better = ["+model.scheduler.threshold=1e9", "+model.scheduler.threshold_mode=abs"]
    model = ["model/scheduler=plateau", "model.scheduler.patience=0", "model.optimizer.lr=0.01"]
    lengths = ["trainer.max_epochs=4", "trainer.log_every_n_steps=1", "logger=default"]
    train(compose("train", [*COMMON, *lengths, *model, *never_better, f"run_dir={tmp_path}"]))
    logged = logged_rates(tmp_path)
    assert logged[:: len(logged) // 4] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4])


def test_a_longer_run_says_that_its_cosine_is_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    cfg = compose("train", [*COMMON, "model/scheduler=cosine", f"run_dir={run_dir}"])
    train(cfg)
    leave_at(run_dir, 7)
    cfg.resume, cfg.trainer.max_epochs = str(run_dir / "checkpoints" / "step_7.ckpt"), 6
    train(cfg)
    assert "The learning-rate schedule now ends at step 30" in capsys.readouterr().err
    assert logged_rates(run_dir)[-1] < 0.02 * 0.005
