"""No silent wrong default for the objective, and for the checkpoints that it selects."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness import UserError, compose, train
from harness.command.check import check
from harness.command.compose import compose_command
from tests.strategy_runs import write_conf

SHORT = ("data=synthetic", "model=mlp", "data.num_train=640", "callbacks.progress_bar=null")


def test_an_objective_s_direction_is_that_of_its_name_or_asked_for(tmp_path: Path) -> None:
    """The classifier says max: the worst loss would be kept as the best, without a word."""
    for name, mode in (("val/loss", "min"), ("val/f1", "max"), ("val/iou", "max")):
        check(command := compose_command("train", [f"objective={name}"]))
        assert (command.cfg.mode, command.cfg.callbacks.checkpoint.mode) == (mode, mode)
    for word, message in (
        ("objective=val/iou_loss", "objective=val/iou_loss: add mode=min if"),
        ("mode=most", "mode=most must be min or max"),
    ):
        with pytest.raises(UserError, match=message):
            check(compose_command("train", [word]))
    for text, word, mode in (("val/quality", "mode=max", "max"), ("val/f1", "mode=min", "min")):
        overrides = write_conf(tmp_path, experiment=f"# @package _global_\nobjective: {text}\n")
        check(command := compose_command("train", [*overrides, word]))
        assert command.cfg.mode == mode
    overrides = write_conf(tmp_path, experiment="# @package _global_\nobjective: null\n")
    assert compose("train", overrides).objective is None


STOP = "+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["objective=val/acuracy", "mode=max"], r"Did you mean objective=val/accuracy\?"),
        (
            ["callbacks=early_stopping", "objective=val/acuracy", "mode=max"],
            r"Early stopping: nothing logs objective=(?s:.*) mean objective=val/accuracy\?",
        ),
        (
            [STOP, "+callbacks.stop.monitor=val/lost"],
            "Early stopping: nothing logs callbacks.<name>.monitor=val/lost. Logged are",
        ),
    ],
)
def test_chosen_score_that_nothing_logs_is_refused(
    overrides: list[str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        train(*SHORT, *overrides, f"output_dir={tmp_path}")


def test_chosen_score_is_not_asked_of_a_run_that_validates_nothing(tmp_path: Path) -> None:
    overrides = ("trainer.limit_val_batches=0", "trainer.max_epochs=2")
    run = train(*SHORT, *overrides, f"output_dir={tmp_path}")
    assert "best.ckpt is the newest checkpoint" in (run.folder / "run.log").read_text()
    saved: Any = torch.load(run.checkpoint, weights_only=True)
    assert saved["global_step"] == 20
    assert "test/accuracy" in run.results
