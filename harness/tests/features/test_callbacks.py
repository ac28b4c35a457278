"""Early stopping, the best k checkpoints, tags and notes of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from harness import UserError, load_run, provenance, train
from harness.checkpoints.reading import read
from harness.command import choose_run
from harness.command.compose import compose
from harness.compat import callbacks_of
from harness.training.build import build
from tests.conftest import ROOT, train_command
from tests.faults import resume_sweep
from tests.faults.fork_server import command


def test_a_run_tells_that_it_has_stopped_early(tmp_path: Path, capsys) -> None:
    words = ["experiment=synthetic", "strategy=cpu", "data.num_train=64", "model.optimizer.lr=0"]
    words += ["model/scheduler=constant", "callbacks=early_stopping"]
    words += ["callbacks.early_stopping.patience=2", f"output_dir={tmp_path}"]
    run = train(*words, conf=ROOT / "conf")
    why = provenance.read(run.folder)["stopped_early"]
    assert why.startswith("in epoch 2: Monitored metric val/accuracy did not improve")
    assert f"stopped early    {why}" in capsys.readouterr().out
    assert f"It was stopped early, {why}." in choose_run.finished(run.folder)


def test_a_run_tells_that_its_time_was_over(tmp_path: Path) -> None:
    words = ["data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=9999"]
    words += ["trainer.max_time=00:00:00:01", f"output_dir={tmp_path}"]
    run = train(*words, conf=ROOT / "conf")
    why = provenance.read(run.folder)["stopped_early"]
    assert re.fullmatch(r"in epoch \d+: trainer.max_time was over", why)
    said = choose_run.finished(run.folder)
    assert f"It was stopped early, {why}. Add trainer.max_time=<more> to train on" in said


@pytest.mark.ci
def test_more_time_trains_a_run_on_that_its_time_has_ended(tmp_path: Path) -> None:
    """Only what is new counts: the time of the earlier start has been used."""
    words = ["data=synthetic", "model=mlp", "strategy=cpu", "trainer.max_epochs=9999"]
    more = ["trainer.max_time=00:00:00:01", "data.num_train=64", f"output_dir={tmp_path}"]
    run = train(*words, *more, conf=ROOT / "conf")

    def last() -> Any:
        return read(run.folder / "checkpoints" / "last.ckpt")

    def used() -> float:
        state: float = last()["callbacks"]["Timer"]["time_elapsed"]["train"]
        return state

    def resumed(max_time: str) -> None:
        train(f"resume={run.folder}", f"trainer.max_time={max_time}", conf=ROOT / "conf")

    first = last()
    resumed("00:00:00:01")
    assert last()["global_step"] == first["global_step"]
    (run.folder / "results.json").unlink()  # as of a run that was killed in its test
    resumed("00:00:00:01")
    assert last()["global_step"] == first["global_step"]
    resumed("00:00:00:02")
    assert last()["global_step"] > first["global_step"]
    assert used() >= 2
    assert last()["epoch"] > first["epoch"]
    assert provenance.read(run.folder)["stopped_early"].endswith("trainer.max_time was over")


def test_best_links_to_the_best_of_k_files(tmp_path: Path) -> None:
    words = ("callbacks=top_k", "callbacks.checkpoint.save_top_k=2", "trainer.max_epochs=3")
    resume_sweep.train(compose("train", (*resume_sweep.COMMON, *words, f"run_dir={tmp_path}")))
    last = read(tmp_path / "checkpoints" / "last.ckpt")["callbacks"]
    (state,) = [state for name, state in last.items() if name.startswith("ModelCheckpoint")]
    best = (tmp_path / "checkpoints" / "best.ckpt").resolve()
    assert best.name == Path(state["best_model_path"]).name
    assert len(list((tmp_path / "checkpoints").glob("best-*.ckpt"))) == 2
    assert "test/accuracy" in json.loads((tmp_path / "results.json").read_text())


def test_a_second_callback_of_a_kind_works_or_says_what_to_type(tmp_path: Path) -> None:
    def built(*callbacks: str) -> list[pl.Callback]:
        words = [f"+callbacks.mine_{i}={callback}" for i, callback in enumerate(callbacks)]
        words += ["data=synthetic", "model=mlp", "strategy=cpu"]
        cfg = compose("train", [*words, f"run_dir={tmp_path}"], conf=ROOT / "conf")
        return callbacks_of(build(cfg)[0])

    def kind(name: str, more: str = "") -> str:
        return f"{{_target_: pytorch_lightning.callbacks.{name}{more}}}"

    bar = kind("TQDMProgressBar")
    bars = [c for c in built(bar) if isinstance(c, pl.callbacks.ProgressBar)]
    assert [type(one) for one in bars] == [pl.callbacks.TQDMProgressBar]
    with pytest.raises(UserError, match=r"trainer\.enable_progress_bar=false"):
        built(bar, bar)
    checkpoints = (", monitor: val/loss, mode: max", ", monitor: epoch", "")
    for more in checkpoints:
        several = built(kind("ModelCheckpoint", more))
        assert sum(isinstance(c, pl.callbacks.ModelCheckpoint) for c in several) == 2
    with pytest.raises(UserError, match=r"callbacks=top_k callbacks\.checkpoint\.save_top_k="):
        built(kind("ModelCheckpoint"), kind("ModelCheckpoint"))


def test_tags_and_notes_are_saved_and_may_change_on_resume(tmp_path: Path) -> None:
    words = ("data=synthetic", "model=mlp", "trainer.max_epochs=1")
    run_dir = train_command(tmp_path, *words, "tags=[baseline,lr]", "notes=why")
    words = ("tags=[baseline]", "notes=longer", "trainer.max_epochs=2")
    result = command("train.py", f"resume={run_dir}", *words)
    assert result.returncode == 0, result.stderr
    config = load_run(run_dir).config
    assert (list(config.tags), config.notes) == (["baseline"], "longer")
