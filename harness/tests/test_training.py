"""Whole runs, started as a user starts them."""

import csv
import json
import math
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.training.build import build
from tests.faults.fork_server import command
from tests.faults.run_folder import only

SHORT = ("data=synthetic", "model=mlp", "trainer.max_epochs=2")


def test_run_folder_holds_everything(finished_run: Path) -> None:
    names = {str(path.relative_to(finished_run)) for path in finished_run.rglob("*")}
    assert names >= {"config.yaml", "overrides.yaml", "metrics.csv", "results.json", "run.log"}
    assert names >= {"checkpoints/best.ckpt", "checkpoints/last.ckpt", "tensorboard"}
    config = (finished_run / "config.yaml").read_text()
    assert "${" not in config.replace("${run_dir}", "")  # a copy must not name the original
    for path in (finished_run / "checkpoints").glob("*.ckpt"):  # plain: they load anywhere
        assert torch.load(path, weights_only=True)["hyper_parameters"]["num_classes"] == 10


def test_screen_shows_start_end_and_next_commands(finished_run: Path) -> None:
    screen = (finished_run.parents[1] / "screen.txt").read_text()
    for text in (
        "strategy",
        "parameters",
        "batch",
        "test/accuracy",
        "of the best weights",
        "tensorboard --logdir",
    ):
        assert text in screen
    assert "-bound: " in next(line for line in screen.splitlines() if line.startswith("speed"))
    assert "Epoch 1: " in (finished_run / "run.log").read_text()
    checkpoint = finished_run / "checkpoints" / "best.ckpt"
    assert f"convert_checkpoint.py {checkpoint}" in screen
    assert "WARNING" not in screen


def test_tensorboard_shows_curves_and_pictures(finished_run: Path) -> None:
    events = EventAccumulator(str(finished_run / "tensorboard"), {"images": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    curves = {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr-AdamW"}
    assert set(tags["scalars"]) >= curves
    assert set(tags["images"]) == {"test/labels"}


def test_evaluate_repeats_the_test_of_the_run(finished_run: Path) -> None:
    checkpoint = finished_run / "checkpoints" / "best.ckpt"
    result = command("evaluate.py", f"checkpoint={checkpoint}", "data.batch_size=100")
    assert result.returncode == 0, result.stderr
    trained = json.loads((finished_run / "results.json").read_text())
    tested = json.loads((only(finished_run / "evaluate") / "results.json").read_text())
    for name in ("test/accuracy", "test/f1", "test/loss"):
        assert math.isclose(trained[name], tested[name], abs_tol=1e-6)


def test_two_processes_train_one_run(tmp_path: Path) -> None:
    words = ("strategy=ddp", "trainer.devices=2", *SHORT, f"output_dir={tmp_path}")
    result = command("train.py", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("test/accuracy") == result.stdout.count("train: ") == 1
    assert "64 samples (train_dataloader), at most 32 at once on each of 2 ranks" in result.stdout
    with (only(tmp_path / "default") / "metrics.csv").open() as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["train/loss"]]
    assert len(steps) == len({*steps})


def test_same_seed_trains_the_same_with_and_without_a_log(make_cfg) -> None:
    def trained(*words: str) -> torch.Tensor:
        small = ("data=synthetic", "model=mlp", "data.num_train=320", "trainer.max_epochs=1")
        cfg = make_cfg(*small, "watch=none", "trainer.enable_progress_bar=false", *words)
        trainer, model, data = build(cfg)
        trainer.fit(model, data)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    weights = trained("seed=1")
    assert torch.equal(weights, trained("seed=1", "logger=none"))
    assert not torch.equal(weights, trained("seed=2", "logger=none"))
