"""Modules and data without knowledge of this library train by YAML alone."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Run, UserError, evaluate, predict, train
from harness.command.check import check
from harness.command.compose import compose_command
from harness.training import user_errors
from tests.strategy_runs import write_conf
from tests.training import foreign

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of few workers


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[str]]:
    """The command that trains classes of foreign.py, each by a YAML file."""

    def make(model: str, data: str, *more: str) -> list[str]:
        groups = {"model": model} | ({"data": data} if data not in ("", "null") else {})
        texts = {group: f"_target_: {foreign.__name__}.{name}\n" for group, name in groups.items()}
        chosen = [*write_conf(tmp_path, **texts), *["data=null"] * (data == "null")]
        quiet = ("callbacks.progress_bar=null", "logger=none", "trainer.max_epochs=2")
        return [*chosen, *quiet, f"output_dir={tmp_path}", *more]

    return make


def told(run: Run) -> str:
    return (run.folder / "run.log").read_text()


def test_run_without_a_test_or_the_default_objective_ends_well(words) -> None:
    for model, data, missing, logs in (
        ("Silent", "TrainOnly", "Silent has no test_step", "val/loss. Logged are: no"),
        ("Validated", "TrainAndVal", "Validated has no test_step", "Logged are: train_loss, v"),
        ("Tested", "TrainAndVal", "TrainAndVal has no test_dataloader", "Did you mean objective="),
    ):
        run = train(*words(model, data, f"name={model}"))
        assert f"The run has no test: {missing}." in told(run)
        assert "best.ckpt is the newest checkpoint: nothing logs objective=val/loss" in told(run)
        assert logs in told(run)
        saved: Any = torch.load(run.checkpoint, weights_only=True)
        assert saved["global_step"] == 8
        assert ("train_loss" in run.results) == (model != "Silent")


def test_start_shows_the_batch_that_a_step_takes(words, capsys) -> None:
    train(*words("Silent", "TrainOnly", "trainer.accumulate_grad_batches=2"))
    shown = (
        "8 samples (train_dataloader), at most 4 at once, with trainer.accumulate_grad_batches=2"
    )
    assert shown in capsys.readouterr().out


def test_objective_is_found_at_the_end_of_an_epoch(words) -> None:
    run = train(*words("LateMetrics", "TrainAndVal", "objective=quality", "mode=max"))
    assert "best.ckpt is" not in told(run)
    assert "which have several values or none: matrix" in told(run)
    assert set(run.results) >= {"quality", "train_loss", "val_loss"}


def test_checkpoint_callback_of_a_module_writes_into_the_run(words) -> None:
    run = train(*words("WithCallbacks", "Whole"))
    assert run.checkpoint.parent == run.folder / "checkpoints"
    assert "test_loss" in run.results
    path = predict(run.checkpoint)
    with path.open() as file:
        assert [row["sample"] for row in csv.DictReader(file)] == [str(i) for i in range(11)]


def test_null_data_takes_the_loaders_of_the_module(words, tmp_path: Path) -> None:
    for text in ("data: null", "defaults:\n  - override /data: null"):
        write_conf(tmp_path, experiment=f"# @package _global_\n{text}\n")
        composed = compose_command("train", words("WithLoaders", "", "experiment=mine"))
        check(composed)
        assert composed.cfg.data is None
    run = train(*words("WithLoaders", "null"))
    assert evaluate(run.checkpoint, "logger=none").results["test_loss"] == pytest.approx(
        run.results["test_loss"]
    )
    with predict(run.checkpoint).open() as file:
        assert len(list(csv.DictReader(file))) == 16
    longer = words("WithLoaders", "null", f"resume={run.folder}", "trainer.max_epochs=3")
    longer.remove("trainer.max_epochs=2")
    assert train(*longer).folder == run.folder
    saved: Any = torch.load(run.checkpoint, weights_only=True)
    assert saved["global_step"] == 12


def test_training_without_loaders_is_refused(words) -> None:
    own = "nothing to train on: Tested has no train_dataloader, and with data=null"
    with pytest.raises(UserError, match=own):
        train(*words("Tested", "null"))
    with pytest.raises(UserError, match=r"data: .*WithLoaders is not a LightningDataModule"):
        train(*words("Tested", "WithLoaders"))
    with pytest.raises(UserError, match="Every run needs a choice of data"):
        check(compose_command("train", ["~data"]))


def test_prediction_that_cannot_be_is_told_with_what_to_write(words) -> None:
    run = train(*words("Bare", "TrainOnly"))
    with pytest.raises(UserError, match="nothing to predict: TrainOnly has no predict_dataloader"):
        predict(run.checkpoint)
    with pytest.raises(TypeError) as raised:
        predict(run.checkpoint, f"data._target_={foreign.__name__}.Whole")
    message = str(user_errors.describe_user_error(raised.value))
    assert "in forward: TypeError: linear()" in message
    assert len(message.splitlines()) <= 3
    with pytest.raises(UserError, match="nothing to evaluate: Bare has no test_step"):
        evaluate(run.checkpoint)
