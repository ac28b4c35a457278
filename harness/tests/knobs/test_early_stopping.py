"""A training that stops early says so, and what may follow."""

from pathlib import Path

from harness import record, train
from harness.command import resume
from tests.conftest import ROOT


def test_a_run_tells_that_it_has_stopped_early(tmp_path: Path, capsys) -> None:
    words = ["experiment=synthetic", "strategy=cpu", "data.num_train=64", "model.optimizer.lr=0"]
    words += ["model/scheduler=constant", "callbacks=early_stopping"]
    words += ["callbacks.early_stopping.patience=2", f"output_dir={tmp_path}"]
    run = train(*words, conf=ROOT / "conf")
    why = record.read(run.folder)["stopped_early"]
    assert why.startswith("in epoch 2: val/accuracy was no better than ")
    assert why.endswith("for 2 validations")
    assert f"stopped early    {why}" in capsys.readouterr().out
    assert f"It was stopped early, {why}." in resume.finished(run.folder)
    assert "max_epochs" not in resume.finished(run.folder)
