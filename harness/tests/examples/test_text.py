"""A text trains the same under every strategy, and after a kill; uneven lines are the hard case."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from harness import evaluate, train
from harness.text.sentences import sentences
from tests.conftest import ROOT
from tests.faults.fork_server import command
from tests.faults.resume_sweep import sweep

EXPERIMENT = (
    *("experiment=text", "data.batch_size=7", "data.length=48", "trainer.max_epochs=2"),
    *("model.net.width=16", "model.net.num_layers=2", "model.net.num_heads=2"),
    *("trainer.precision=64-true", "trainer.limit_test_batches=3", "strategy=cpu"),
    *("callbacks.progress_bar=null", "trainer.log_every_n_steps=2"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Lines of very different lengths."""
    folder = tmp_path_factory.mktemp("text")
    lines = sentences(83, 1).splitlines()
    rng = random.Random(0)
    lines = [line[: rng.choice([1, 3, 10, 80])] for line in lines]
    (folder / "text.txt").write_text("\n".join(lines))
    return f"data.file={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"


def finished(folder: Path, *words: str) -> dict[str, object]:
    result = command("train.py", *EXPERIMENT, *words, f"output_dir={folder}")
    assert result.returncode == 0, result.stderr
    (run,) = (folder / "text").iterdir()
    return {
        "weights": torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"],
        "results": json.loads((run / "results.json").read_text()),
        "samples": {path.name: path.read_text() for path in (run / "samples").iterdir()},
    }


def test_weights_and_scores_are_those_of_one_process(text, tmp_path: Path) -> None:
    ddp = ("strategy=ddp", "trainer.devices=3", "data.num_workers=1")
    lines = (*text, "data.unit=lines")
    expected = finished(tmp_path / "one", *lines)
    for i, strategy in enumerate((ddp, ("trainer.accumulate_grad_batches=3",))):
        found = finished(tmp_path / str(i), *lines, *strategy)
        for name, weight in expected["weights"].items():
            difference = (weight - found["weights"][name]).abs().max()
            assert difference <= 1e-11, (strategy, name)
        assert found["results"] == pytest.approx(expected["results"], abs=1e-6)
        assert found["samples"] == expected["samples"]


def test_resume_inside_an_epoch_equals_the_run_by_bit(text, tmp_path: Path) -> None:
    """With dropout, and windows that begin elsewhere in each epoch."""
    words = [word for word in EXPERIMENT if "64-true" not in word]
    words += ["model.net.dropout=0.2", "trainer.limit_train_batches=2", "data.unit=corpus"]
    words += ["checkpoint.every_n_steps=1", "checkpoint.num_kept=1000"]
    words += ["trainer.enable_progress_bar=false", "callbacks.text_samples.num_tokens=5"]
    found = dict(sweep([*words, *text], tmp_path))
    assert len(found) >= 4
    assert {step: differences for step, differences in found.items() if differences} == {}


def test_an_evaluation_on_another_text_is_told(text, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    shutil.copy(text[0].partition("=")[2], file)
    words = [*EXPERIMENT, *text, f"data.file={file}", f"output_dir={tmp_path / 'o'}"]
    run = train(*words, "trainer.max_epochs=1", conf=ROOT / "conf")
    told = "the test may be on text that was trained on"
    checks = []
    for more in ("", "A line that was not there.\n"):
        file.write_text(more + file.read_text())
        folder = evaluate(run.checkpoint, conf=ROOT / "conf").folder
        checks.append(told in (folder / "run.log").read_text())
    assert checks == [False, True]
