"""Whole runs, started as a user starts them."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harness.command import hydra_job, run_folder
from harness.errors import UserError
from harness.run import tasks as run
from harness.testing import command as typed
from tests_harness.conftest import ROOT, slow
from tests_harness.faults.fork_server import command

SHORT = ("data=synthetic", "model=mlp", "trainer.max_epochs=2")


def only(folder: Path) -> Path:
    (child,) = folder.iterdir()
    return child


def test_run_folder_holds_everything(finished_run: Path) -> None:
    names = {str(path.relative_to(finished_run)) for path in finished_run.rglob("*")}
    assert names >= {
        "config.yaml",
        "overrides.yaml",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
        "metrics.csv",
        "results.json",
        "run.log",
        "tensorboard",
    }
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
    assert f"evaluate.py checkpoint={checkpoint}" in screen
    assert "WARNING" not in screen


def test_tensorboard_shows_curves_settings_and_pictures(finished_run: Path) -> None:
    events = EventAccumulator(str(finished_run / "tensorboard"), {"images": 0, "scalars": 0})
    events.Reload()
    tags = events.Tags()
    curves = {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "lr-AdamW"}
    assert set(tags["scalars"]) >= curves
    assert set(tags["images"]) == {"test/confusion_matrix", "test/worst_mistakes"}
    assert "_hparams_/experiment" in events.summary_metadata
    # What differs from run to run is not in the table, which a run that goes on repeats by bit.
    assert set(tags["scalars"]) >= {"throughput/data", "throughput/samples_per_second"}
    assert "throughput" not in (finished_run / "metrics.csv").read_text()


def test_evaluate_repeats_the_test_of_the_run(finished_run: Path) -> None:
    checkpoint = finished_run / "checkpoints" / "best.ckpt"
    result = command("evaluate.py", f"checkpoint={checkpoint}", "data.batch_size=100")
    assert result.returncode == 0, result.stderr
    trained = json.loads((finished_run / "results.json").read_text())
    tested = json.loads((only(finished_run / "evaluate") / "results.json").read_text())
    for name in ("test/accuracy", "test/f1", "test/loss"):
        assert math.isclose(trained[name], tested[name], abs_tol=1e-6)


def test_predict_writes_a_row_per_sample(finished_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "predictions.csv"
    result = command(
        "predict.py",
        f"checkpoint={finished_run / 'checkpoints' / 'best.ckpt'}",
        "data.num_test=5",
        f"output={output}",
    )
    assert result.returncode == 0, result.stderr
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["sample"] for row in rows] == ["0", "1", "2", "3", "4"]
    for row in rows:
        probabilities = [float(row[f"p{i}"]) for i in range(10)]
        assert math.isclose(sum(probabilities), 1, abs_tol=1e-5)
        assert probabilities[int(row["prediction"])] == float(row["confidence"])


def test_checkpoints_hold_plain_values_only(finished_run: Path) -> None:
    """They load where neither this project nor Lightning is installed."""
    for path in (finished_run / "checkpoints").glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["hyper_parameters"]["num_classes"] == 10


@pytest.mark.parametrize("strategy", ["ddp", *slow("ddp_spawn")])
def test_two_processes_train_one_run(strategy: str, tmp_path: Path) -> None:
    result = typed(
        "train.py", f"strategy={strategy}", "trainer.devices=2", *SHORT, f"output_dir={tmp_path}"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("test/accuracy") == 1
    assert result.stdout.count("run folder") == 1
    run_dir = only(tmp_path / "default")
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [row for row in rows if row["train/loss"]]
    assert len(losses) == len({row["step"] for row in losses})


def test_torchrun_processes_share_one_folder(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *("train.py", "strategy=ddp", "trainer.devices=2", *SHORT, f"output_dir={tmp_path}"),
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (only(tmp_path / "default") / "results.json").exists()


@pytest.mark.slow
def test_sweep_with_two_processes_runs_each_job_once(tmp_path: Path) -> None:
    result = typed("train.py", "-m", "seed=1,2", "strategy=ddp", *SHORT, f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    sweep = only(only(tmp_path / "sweeps"))
    jobs = [path for path in sorted(sweep.iterdir()) if path.is_dir()]
    assert [job.name for job in jobs] == ["0", "1"]
    results = [json.loads((job / "results.json").read_text()) for job in jobs]
    assert results[0] != results[1]


def test_failed_job_of_a_sweep_is_told_and_the_others_run(tmp_path: Path) -> None:
    result = command(
        "train.py", "-m", "model.net.dropout=2,0", *SHORT, "test=false", f"output_dir={tmp_path}"
    )
    assert result.returncode == 1
    assert "dropout probability has to be between 0 and 1" in result.stdout
    assert (only(only(tmp_path / "sweeps")) / "1" / "results.json").exists()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = {run_folder.make(tmp_path) for _ in range(5)}
    assert len(folders) == 5


def test_best_checkpoint_is_tested(make_cfg, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the highest validation accuracy, not the last."""
    tested = []
    load_weights = run.load_weights

    def load(model, path):
        tested.append((path.name, float(model.trainer.checkpoint_callback.best_model_score)))
        load_weights(model, path)

    monkeypatch.setattr(run, "load_weights", load)
    cfg = make_cfg(
        "data=synthetic", "model=mlp", "trainer.max_epochs=4", "trainer.enable_progress_bar=false"
    )
    cfg.model.scheduler, cfg.model.optimizer.lr = None, 0.1  # accuracy goes up and down
    run.train(cfg)
    with Path(cfg.run_dir, "metrics.csv").open() as file:
        accuracies = [float(row["val/accuracy"] or 0) for row in csv.DictReader(file)]
    ((path, score),) = tested
    assert path == "best.ckpt"
    assert score == max(accuracies)


def test_logged_loss_is_that_of_the_steps_since_the_last(make_cfg) -> None:
    cfg = make_cfg(
        "data=synthetic", "model=mlp", "watch=none", "trainer.max_epochs=1", "test=false"
    )
    cfg.trainer.log_every_n_steps, cfg.trainer.enable_progress_bar = 1, False
    trainer, model, data = run.build(cfg)
    losses = []
    step = model.training_step

    def watched(batch, batch_idx):
        loss = step(batch, batch_idx)
        losses.append(float(loss.detach()))
        return loss

    model.training_step = watched
    trainer.fit(model, data)
    for logger in trainer.loggers:
        logger.finalize("success")
    with Path(cfg.run_dir, "metrics.csv").open() as file:
        logged = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert logged == pytest.approx(losses)


def test_settings_reach_the_loader(make_cfg) -> None:
    settings = (
        "data=synthetic",
        "data.num_workers=2",
        "data.prefetch_factor=5",
        "data.persistent_workers=false",
    )
    trainer, model, data = run.build(make_cfg(*settings, "data.pin_memory=true", "seed=7"))
    model.trainer = data.trainer = trainer
    trainer.strategy.connect(model)
    assert data.train_dataloader().batch_sampler.seed == 7
    loader = data.val_dataloader()
    assert (loader.num_workers, loader.prefetch_factor) == (2, 5)
    assert loader.pin_memory
    assert not loader.persistent_workers
    data.pin_memory = "auto"
    assert not data.val_dataloader().pin_memory  # there is nothing to copy to


def test_sweep_looks_at_the_objective(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"val/accuracy": 0.5, "val/loss": 2.0}')
    assert hydra_job.objective_of(tmp_path, "val/loss") == 2.0
    assert hydra_job.objective_of(tmp_path, None) is None
    with pytest.raises(UserError, match="objective=val/f1 is not among the results"):
        hydra_job.objective_of(tmp_path, "val/f1")


def test_overfitting_sees_the_same_batches_in_every_epoch(make_cfg) -> None:
    cfg = make_cfg(
        "debug=overfit", "data=synthetic", "model=mlp", "logger=none", "trainer.max_epochs=3"
    )
    cfg.trainer.enable_progress_bar = False
    trainer, model, data = run.build(cfg)
    seen = []
    step = model.training_step

    def watched(batch, batch_idx):
        seen.append(batch[0])
        return step(batch, batch_idx)

    model.training_step = watched
    trainer.fit(model, data)
    assert len(seen) == 6
    for epoch in (1, 2):
        assert torch.equal(seen[2 * epoch], seen[0])
        assert torch.equal(seen[2 * epoch + 1], seen[1])


def test_same_seed_gives_the_same_weights(make_cfg) -> None:
    def weights(seed: int) -> torch.Tensor:
        cfg = make_cfg(
            "data=synthetic",
            "model=mlp",
            "watch=none",
            "logger=none",
            f"seed={seed}",
            "test=false",
        )
        cfg.trainer.max_epochs = 1
        cfg.trainer.enable_progress_bar = False
        trainer, model, data = run.build(cfg)
        trainer.fit(model, data)
        return torch.nn.utils.parameters_to_vector(model.parameters())

    first = weights(1)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))
