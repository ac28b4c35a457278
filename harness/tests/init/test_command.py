"""``init`` of a command: which runs start, resume without the file, or are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness import Run, UserError, evaluate, train
from harness.command.check import check
from harness.command.compose import compose, compose_command
from harness.convert import convert
from tests.faults.run_folder import contents, differences, leave_at

QUICK = (
    *("data=synthetic", "model=mlp", "trainer.max_epochs=1", "trainer.limit_train_batches=2"),
    *("callbacks.progress_bar=null", "logger.tensorboard=null", "callbacks.learning_rate=null"),
)


@pytest.fixture
def weights(finished_run: Path, tmp_path: Path) -> Path:
    """Those of the finished run, as a file that a test may take away."""
    path = tmp_path / "epoch=3-step=(4).safetensors"  # as Lightning names its own
    convert(finished_run, path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    return lambda *words: train(*QUICK, f"output_dir={tmp_path}/runs", *words)


def test_a_run_starts_from_a_file_and_says_so(weights: Path, run: Callable[..., Run]) -> None:
    started = run(f"init='{weights}'", "trainer.limit_train_batches=1", "model.optimizer.lr=0.0")
    best = torch.load(started.checkpoint, weights_only=False)["state_dict"]
    log = (started.folder / "run.log").read_text()
    assert f"starts from: {weights} (safetensors)" in log
    assert "loaded net.layers.1.weight <- layers.1.weight" in log
    # AdamW has decayed nothing: its rate is zero.
    assert all(torch.equal(best[f"net.{k}"], value) for k, value in load_file(weights).items())


def test_a_run_goes_on_and_is_evaluated_without_the_file(
    weights: Path, run: Callable[..., Run]
) -> None:
    words = (f"init='{weights}'", "trainer.limit_train_batches=4")
    often = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=9", "test=false")
    begun = run(*words, *often)
    expected = contents(begun.folder)
    weights.unlink()
    leave_at(begun.folder, 3)
    assert run("resume=auto", *words).folder == begun.folder
    assert differences(expected, contents(begun.folder)) == []
    assert (begun.folder / "run.log").read_text().count("starts from") == 1
    assert evaluate(begun.checkpoint).results["test/accuracy"] > 0
    leave_at(begun.folder, 3)
    with pytest.raises(UserError, match="cannot be resumed with"):
        run(f"resume={begun.folder}", "init=other.pt")


def test_one_word_a_dict_and_an_experiment_name_keys(weights: Path, tmp_path: Path) -> None:
    assert compose("train", [f"init='{weights}'"]).init.path == str(weights)
    assert compose("train", [f"init={{path: '{weights}', freeze: [net]}}"]).init.freeze == ["net"]
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    words = [f"hydra.searchpath=[file://{tmp_path}/conf]", "experiment=mine"]
    file.write_text(f"# @package _global_\ninit:\n  path: {weights}\n")
    assert compose("train", words).init.path == str(weights)
    file.write_text(f"# @package _global_\ninit: {weights}\n")
    with pytest.raises(UserError, match=r"mine.yaml:2: init has the value .*, but needs keys"):
        check(compose_command("train", words))


def test_mistakes_are_answered_in_lines_and_leave_nothing(
    weights: Path, finished_run: Path, tmp_path: Path
) -> None:
    for words, said in (
        ("init=wieghts.safetensors", "init.path=wieghts.safetensors does not exist."),
        ("init=conf", "init.path=conf is neither a checkpoint file, nor a run's folder"),
        ("init=train.py", "init.path=train.py: the file is not a checkpoint, or is damaged"),
        (
            "init.freeze=[nett]",
            "init.freeze=['nett']: no part is named nett. Did you mean net?",
        ),
        ("init.rename=fc", "init.rename=fc must map names: type init.rename={fc:head}"),
        ("init.pth=a.pt", "There is no key init.pth. Did you mean init.path?"),
        (f"init={finished_run} model.net.hidden=[128,32]", "3 of the 6 tensors of net fit"),
        ("init.unfreeze_at_epoch=3", "no part is frozen. Add init.freeze=[<part>]."),
        ("init.unfreeze_at_epoch=0", "init.unfreeze_at_epoch=0 must be a whole number, 1 or more"),
    ):
        with pytest.raises(UserError) as caught:
            train(*QUICK, f"output_dir={tmp_path}/never", *words.split())
        assert said in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 3
        assert not [*(tmp_path / "never").glob("*")], words
