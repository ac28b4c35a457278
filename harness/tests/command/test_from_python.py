"""Runs that a notebook or a script starts: the same folders, and a caller that lives on."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import harness
from harness import UserError, compose, evaluate, load_run, predict, train
from tests.conftest import ROOT

SHORT = ("data=synthetic", "model=mlp", "data.num_train=640", "trainer.max_epochs=2")
CONF = str(ROOT / "conf")


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
    again = evaluate(run.checkpoint)
    assert again.folder.parent == run.folder / "evaluate"
    assert again.results["test/loss"] == pytest.approx(run.results["test/loss"], abs=1e-6)
    table = predict(run.checkpoint, f"output={tmp_path / 'table.csv'}")
    assert len(table.read_text().splitlines()) == 361


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
    with pytest.raises(UserError, match=r"sweeps are python train\.py -m"):
        train(*words, "hydra.mode=MULTIRUN")
    with pytest.raises(UserError, match="is not the config of a run"):
        load_run(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_script_trains_with_two_processes_twice(tmp_path: Path) -> None:
    """Lightning starts the second process by running the same program again: not this script."""
    script = tmp_path / "study.py"
    script.write_text(
        "from harness import train\n"
        "print('the script begins')\n"
        "for seed in (1, 2):\n"
        f"    run = train(*{SHORT}, 'trainer.max_epochs=1', 'trainer.devices=2',\n"
        "        f'seed={seed}', 'trainer.accelerator=cpu',\n"
        f"        'output_dir={tmp_path}', conf={CONF!r})\n"
        "    print('reached', run.results['test/accuracy'], run.folder)\n"
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=560, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("the script begins") == 1
    assert result.stdout.count("reached") == 2
    assert len(list((tmp_path / "default").iterdir())) == 2


def test_face_shows_what_it_documents() -> None:
    assert harness.__doc__ is not None
    for name in harness.__all__:
        assert getattr(harness, name).__name__ == name
        assert f"``{name}``" in harness.__doc__
    with pytest.raises(AttributeError, match="harness has no nonsense"):
        _ = harness.nonsense
