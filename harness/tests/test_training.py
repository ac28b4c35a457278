"""Whole runs, started as a user starts them."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.run import train as run
from tests.faults.fork_server import command

SHORT = ("data=synthetic", "model=mlp", "trainer.max_epochs=2")


def only(folder: Path) -> Path:
    (child,) = folder.iterdir()
    return child


def test_run_folder_holds_everything(finished_run: Path) -> None:
    names = {str(path.relative_to(finished_run)) for path in finished_run.rglob("*")}
    assert names >= {"config.yaml", "overrides.yaml", "metrics.csv", "results.json", "run.log"}
    assert names >= {"checkpoints/best.ckpt", "checkpoints/last.ckpt", "tensorboard"}
    assert "max_epochs=2" in (finished_run / "overrides.yaml").read_text()
    config = (finished_run / "config.yaml").read_text()
    assert "${" not in config.replace("${run_dir}", "")  # a copy must not name the original


def test_screen_shows_start_end_and_next_commands(finished_run: Path) -> None:
    screen = (finished_run / "screen.txt").read_text()
    for text in ("strategy", "parameters", "batch", "test/accuracy", "tensorboard --logdir"):
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


def test_checkpoints_hold_plain_values_only(finished_run: Path) -> None:
    """They load where neither this project nor Lightning is installed."""
    for path in (finished_run / "checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["hyper_parameters"]["num_classes"] == 10


def test_two_processes_train_one_run(tmp_path: Path) -> None:
    words = ("strategy=ddp", "trainer.devices=2", *SHORT, f"output_dir={tmp_path}")
    result = command("train.py", *words)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("test/accuracy") == result.stdout.count("run folder") == 1
    with (only(tmp_path / "default") / "metrics.csv").open() as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["train/loss"]]
    assert len(steps) == len({*steps})


def test_best_checkpoint_is_tested(make_cfg, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the highest validation accuracy, not the last."""
    tested = []
    load_weights = run.load_weights

    def load(model, path):
        tested.append((path.name, float(model.trainer.checkpoint_callback.best_model_score)))
        load_weights(model, path)

    monkeypatch.setattr(run, "load_weights", load)
    cfg = make_cfg(
        *("data=synthetic", "model=mlp", "data.num_train=320", "trainer.max_epochs=4"),
        "trainer.enable_progress_bar=false",
    )
    cfg.model.scheduler, cfg.model.optimizer.lr = None, 0.1  # accuracy goes up and down
    run.train(cfg)
    with Path(cfg.run_dir, "metrics.csv").open() as file:
        accuracies = [float(row["val/accuracy"] or 0) for row in csv.DictReader(file)]
    ((path, score),) = tested
    assert path == "best.ckpt"
    assert score == max(accuracies)


def test_same_seed_trains_the_same_and_logs_each_steps_loss(make_cfg) -> None:
    def trained(*words: str) -> tuple[list[float], torch.Tensor, Path]:
        """The loss of each training step, the last weights, and the run's folder."""
        small = ("data=synthetic", "model=mlp", "data.num_train=320", "trainer.max_epochs=1")
        cfg = make_cfg(*small, "watch=none", "test=false", "trainer.log_every_n_steps=1", *words)
        cfg.trainer.enable_progress_bar = False
        trainer, model, data = run.build(cfg)
        losses, step = [], model.training_step

        def watch(batch, batch_idx):
            loss = step(batch, batch_idx)
            losses.append(float(loss.detach()))
            return loss

        model.training_step = watch
        trainer.fit(model, data)
        for logger in trainer.loggers:
            logger.finalize("success")
        weights = torch.nn.utils.parameters_to_vector(model.parameters())
        return losses, weights, Path(cfg.run_dir)

    losses, weights, run_dir = trained("seed=1")
    with (run_dir / "metrics.csv").open() as file:
        logged = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert logged == pytest.approx(losses)
    assert torch.equal(weights, trained("seed=1", "logger=none")[1])
    assert not torch.equal(weights, trained("seed=2", "logger=none")[1])
