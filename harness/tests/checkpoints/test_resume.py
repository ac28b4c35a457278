"""A run resumes from any step as if it had never stopped."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from small.data import ArrayDataset

from harness.checkpoints import lookup, safe_point
from harness.command.compose import compose
from harness.compat.resume import position_in
from harness.errors import AgreedExit, UserError
from harness.training.train import load_model
from tests.conftest import ci, slow
from tests.faults.resume_sweep import COMMON, FAST, LESS_FAST, SLOW, WRAPPED, sweep, train


@pytest.mark.parametrize("name", [*FAST, *ci(*LESS_FAST), *slow(*SLOW)])
def test_resume_from_every_step_equals_the_run_by_bit(name: str, tmp_path: Path) -> None:
    found = dict(sweep((FAST | LESS_FAST | SLOW)[name], tmp_path / "runs"))
    assert len(found) >= 4
    assert {step: wrong for step, wrong in found.items() if wrong} == {}


def test_a_longer_run_has_what_metrics_have_counted_over_all_epochs(tmp_path: Path) -> None:
    def trained(name: str, num_epochs: int, *words: str) -> dict[str, Any]:
        (folder := tmp_path / name).mkdir(exist_ok=True)
        settings = (*COMMON, *WRAPPED, "data.batch_size=500", f"trainer.max_epochs={num_epochs}")
        train(compose("train", [*settings, f"run_dir={folder}", *words]))
        last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
        return last["state_dict"] | last["safe_point"]["all_ranks"]["callback_metrics"]

    expected = trained("whole", 3)
    trained("longer", 2)
    last = tmp_path / "longer" / "checkpoints" / "step_6.ckpt"
    torch.testing.assert_close(trained("longer", 3, f"resume={last}"), expected, rtol=0, atol=0)


# Without a schedule no code reads the loaders before training starts.
SHORT = (
    *COMMON,
    "~model.scheduler",
    "+model.scheduler=null",
    "model.optimizer._target_=torch.optim.SGD",
    "trainer.max_epochs=1",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps of one epoch."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    folder.mkdir()
    train(compose("train", [*SHORT, f"run_dir={folder}"]))
    return folder


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


def going_on(stopped: Path, step: int, *words: str) -> DictConfig:
    """The config of a command that resumes from a step."""
    checkpoint = f"resume={lookup.path_of(stopped / 'checkpoints', step)}"
    return compose("train", [*SHORT, *words, f"run_dir={stopped}", checkpoint])


def everything(folder: Path) -> dict[Path, bytes]:
    kept = [folder / "metrics.csv", *folder.glob("tensorboard/*"), *folder.glob("checkpoints/*")]
    return {path: path.read_bytes() for path in kept}


def test_newest_checkpoints_are_kept_and_load_as_plain_values(tmp_path: Path) -> None:
    """More epochs continue with a longer schedule."""
    few = ("checkpoint.every_n_steps=4", "checkpoint.num_kept=2", "trainer.max_epochs=2")
    cfg = compose("train", [*COMMON, *few, f"run_dir={tmp_path}"])
    train(cfg)
    checkpoints = lookup.by_step(tmp_path / "checkpoints")
    assert [path.stem for path in checkpoints] == ["step_8", "step_10"]
    checkpoint = torch.load(checkpoints[0], weights_only=True)
    assert position_in(checkpoint, batches_per_step=1) == (1, 3)
    assert checkpoint["loaders"][0]["settings"]["num_samples"] == 1250
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().stem == "step_10"
    cfg.trainer.max_epochs, cfg.resume = 3, str(checkpoints[1])
    train(cfg)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 15
    assert last["lr_schedulers"][0]["total_steps"] == 15
    assert "schedule now ends at step 15" in (tmp_path / "run.log").read_text()


def test_resumed_run_reads_no_sample_that_it_skips(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, original = [], ArrayDataset.__getitems__

    def read(self: ArrayDataset, indices: list[int]) -> Any:
        if self.augment is not None:  # the training images
            reads.append(len(indices))
        return original(self, indices)

    monkeypatch.setattr(ArrayDataset, "__getitems__", read)
    train(going_on(stopped, 4, "test=false"))
    assert reads == [50]  # 1,250 samples, 300 a step: the rest of the epoch


def test_run_that_was_stopped_after_its_last_step_only_tests(stopped: Path) -> None:
    """Early stopping and the averaged weights hold as well; see the sweep."""
    results = (stopped / "results.json").read_text()
    (stopped / "results.json").unlink()
    train(going_on(stopped, 5))
    assert (stopped / "results.json").read_text() == results


def test_another_format_and_another_data_set_are_refused_and_leave_the_run_as_it_was(
    stopped: Path,
) -> None:
    """Version 0.3 wrote no format; its weights are read as ever."""
    before = everything(stopped)
    with pytest.raises(UserError, match="num_samples=1250, but this command has num_samples=1000"):
        train(going_on(stopped, 3, "data.num_train=1000"))
    assert {path: path.read_bytes() for path in before} == before
    checkpoint = lookup.path_of(stopped / "checkpoints", 3)
    content = torch.load(checkpoint, weights_only=True)
    del content["safe_point"]["format"]
    torch.save(content, checkpoint)
    before, cfg = everything(stopped), going_on(stopped, 3)
    with pytest.raises(UserError, match="another version of the library wrote it"):
        train(cfg)
    assert {path: path.read_bytes() for path in before} == before
    assert load_model(cfg, checkpoint)


EVERY_3 = ("trainer.val_check_interval=3", "trainer.check_val_every_n_epoch=null")


def test_checkpoint_is_written_before_a_validation_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a signal in the middle of it. How long the first one takes is not known."""
    for number, (settings, long_seconds, expected) in enumerate(
        (((), 9.0, [4, 10]), (EVERY_3, 0.0, [2, 5, 8, 10]))
    ):
        monkeypatch.setattr(safe_point, "LONG_SECONDS", long_seconds)
        folder = tmp_path / str(number)
        folder.mkdir()
        short = ("trainer.max_epochs=2", "test=false", "checkpoint.every_n_steps=null")
        train(compose("train", [*COMMON, *settings, *short, f"run_dir={folder}"]))
        found = lookup.by_step(folder / "checkpoints")
        assert found == [lookup.path_of(folder / "checkpoints", step) for step in expected]


class SignalInLastValidation(pl.Callback):
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_signal_after_the_last_step_is_answered_before_the_test(tmp_path: Path) -> None:
    """No safe point follows, and the test may take longer than a user waits."""
    late = f"+callbacks.late._target_={__name__}.SignalInLastValidation"
    with pytest.raises(AgreedExit) as left:
        train(compose("train", [*SHORT, late, f"run_dir={tmp_path}"]))
    assert left.value.code == 128 + signal.SIGTERM
    assert lookup.by_step(tmp_path / "checkpoints")[-1].name == "step_5.ckpt"
    assert not (tmp_path / "results.json").exists()
