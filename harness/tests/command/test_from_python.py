"""Runs that a notebook or a script starts: the same folders, and a caller that lives on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import harness
from harness import UserError, compose, evaluate, load_run, predict, train

SHORT = ("data=synthetic", "model=mlp", "data.num_train=640", "trainer.max_epochs=2")


class Interrupt(pl.Callback):
    """Do what Jupyter's stop button does, in the middle of training."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGINT)


def test_run_trains_evaluates_and_predicts(tmp_path: Path) -> None:
    run = train(*SHORT, f"output_dir={tmp_path}")
    assert run.folder.parent == tmp_path / "default"
    assert load_run(run.folder).results == run.results
    assert run.results["test/accuracy"] > 0.2
    curve = load_run(run.folder).table.select("step", "val/accuracy").drop_nulls()
    assert curve["step"].to_list() == [9, 19]
    images = torch.rand(3, 1, 8, 8)
    assert run.model(images).shape == (3, 10)
    assert not run.model.training
    data: Any = load_run(run.folder).data
    data.prepare_data()
    data.setup("test")
    num_samples = sum(len(labels) for _, labels in data.test_dataloader())
    again = evaluate(run.checkpoint)
    assert again.folder.parent == run.folder / "evaluate"
    assert again.results["test/loss"] == pytest.approx(run.results["test/loss"], abs=1e-6)
    table = predict(run.checkpoint, f"output={tmp_path / 'table.csv'}")
    assert len(table.read_text().splitlines()) == 361 == num_samples + 1
    assert type(again.data) is type(data)


def test_interrupted_run_saves_and_leaves_the_caller_alive(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    words = (*SHORT, f"output_dir={tmp_path}")
    with pytest.raises(KeyboardInterrupt):
        train(*words, f"+callbacks.interrupt._target_={__name__}.Interrupt")
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    (folder,) = (tmp_path / "default").iterdir()
    assert not load_run(folder).results
    assert load_run(folder).table.shape == (0, 1)  # nothing was logged yet
    assert (folder / "checkpoints" / "step_7.ckpt").exists()
    run = train("resume=auto", f"output_dir={tmp_path}")
    assert run.folder == folder
    assert run.results["test/accuracy"] > 0.2


def test_mistakes_are_raised_and_leave_nothing(tmp_path: Path) -> None:
    words = (*SHORT, f"output_dir={tmp_path}")
    with pytest.raises(UserError, match=r"There is no key trainer\.max_epoch"):
        train(*words, "trainer.max_epoch=2")
    with pytest.raises(UserError, match=r"there is no train\.yaml"):
        compose("train", conf=tmp_path)
    with pytest.raises(UserError, match=r"type python train\.py .* strategy=ddp"):
        train(*words, "strategy=ddp")
    with pytest.raises(UserError, match="is not the config of a run"):
        load_run(tmp_path)
    assert not list(tmp_path.iterdir())


def test_face_shows_what_it_documents() -> None:
    assert harness.__doc__ is not None
    for name in harness.__all__:
        assert getattr(harness, name).__name__ == name
        assert f"``{name}``" in harness.__doc__
    with pytest.raises(AttributeError, match="harness has no nonsense"):
        _ = harness.nonsense
