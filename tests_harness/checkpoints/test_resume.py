"""A run goes on from any step as if it had never stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import lookup, safe_point
from harness.command.compose import compose
from harness.errors import UserError
from harness.exact import seeded_steps
from harness.run.tasks import load_model
from harness.upstream import logged_values, resume_counters, resume_states
from harness.upstream.resume_counters import position_in
from tests_harness.conftest import slow
from tests_harness.faults.resume_sweep import COMMON, CONFIGURATIONS, sweep, train

ALL_KNOBS, *FEWER = CONFIGURATIONS


@pytest.mark.parametrize("name", [ALL_KNOBS, *slow(*FEWER)])
def test_resume_from_every_step_equals_the_run_by_bit(name: str, tmp_path: Path) -> None:
    found = dict(sweep(name, tmp_path))
    assert len(found) >= 7
    assert {step: differences for step, differences in found.items() if differences} == {}


def nothing(*_: Any, **__: Any) -> None:
    return None


REPAIRS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "counters": (resume_counters, "repair_counters", nothing, "dropout, OneCycle"),
    "validation": (resume_counters, "repair_validation", nothing, "dropout, OneCycle"),
    "current score": (resume_states, "repair_current_scores", nothing, "dropout, OneCycle"),
    "precision": (resume_states, "repair_precision", nothing, "double precision"),
    "end of the restart": (resume_counters, "end_restart", nothing, "ReduceLROnPlateau"),
    "logged sums": (logged_values, "restored", nothing, "every kind of log"),
    "metrics": (logged_values, "restore_metric", nothing, "dropout, OneCycle"),
    "logged values": (logged_values, "restore_of_all_ranks", nothing, "every kind of log"),
    "seeds": (seeded_steps, "seed_generators", nothing, "dropout, OneCycle"),
}
QUICK = ("counters", "logged sums", "seeds")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in REPAIRS if name not in QUICK))])
def test_repair_is_needed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Lightning mends what is repaired here: the repair can then go."""
    module, function, replacement, configuration = REPAIRS[name]
    monkeypatch.setattr(module, function, replacement)
    try:
        is_equal = not any(differences for _, differences in sweep(configuration, tmp_path))
    except Exception:  # what a missing repair leads to is Lightning's affair
        is_equal = False
    assert not is_equal


def test_newest_checkpoints_are_kept_and_load_as_plain_values(tmp_path: Path) -> None:
    words = (*COMMON, "checkpoint.every_n_steps=4", "checkpoint.num_kept=3")
    train(compose("train", [*words, f"run_dir={tmp_path}"]))
    steps = [path.stem for path in lookup.by_step(tmp_path / "checkpoints")]
    assert steps == ["step_8", "step_12", "step_15"]
    checkpoint = torch.load(tmp_path / "checkpoints" / "step_8.ckpt", weights_only=True)
    assert position_in(checkpoint, batches_per_step=1) == (1, 3)
    assert checkpoint["loaders"][0]["settings"]["num_samples"] == 1250
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().stem == "step_15"


def test_resumed_run_reads_no_sample_that_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from project.data.memory import InMemory

    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "trainer.max_epochs=1", "test=false"])
    train(cfg)
    checkpoint = tmp_path / "checkpoints" / "step_4.ckpt"
    cfg.resume = str(checkpoint)
    for later in lookup.by_step(checkpoint.parent)[4:]:
        later.unlink()
    reads = []
    original = InMemory.__getitems__

    def read(self: InMemory, indices: list[int]) -> Any:
        if self.augment is not None:  # the training images
            reads.append(len(indices))
        return original(self, indices)

    monkeypatch.setattr(InMemory, "__getitems__", read)
    train(cfg)
    assert reads == [50]  # 1,250 samples, 300 a step: the rest of the epoch


def test_more_epochs_go_on_with_a_longer_schedule(tmp_path: Path) -> None:
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "trainer.max_epochs=2"])
    train(cfg)
    cfg.trainer.max_epochs = 4
    cfg.resume = str(tmp_path / "checkpoints" / "step_10.ckpt")
    train(cfg)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 20
    assert last["lr_schedulers"][0]["total_steps"] == 20
    assert "schedule now ends at step 20" in (tmp_path / "run.log").read_text()


def test_run_that_was_stopped_after_its_last_step_only_tests(tmp_path: Path) -> None:
    """Early stopping and the averaged weights hold as well; see the sweep."""
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "trainer.max_epochs=1"])
    train(cfg)
    results = (tmp_path / "results.json").read_text()
    (tmp_path / "results.json").unlink()
    cfg.resume = str(tmp_path / "checkpoints" / "step_5.ckpt")
    train(cfg)
    assert (tmp_path / "results.json").read_text() == results


def test_checkpoint_of_another_format_is_refused_for_going_on_alone(tmp_path: Path) -> None:
    """Version 0.3 wrote none; its weights are read as ever."""
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "trainer.max_epochs=1"])
    train(cfg)
    checkpoint = tmp_path / "checkpoints" / "step_3.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    del content["safe_point"]["format"]
    torch.save(content, checkpoint)
    before = {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()}
    cfg.resume = str(checkpoint)
    with pytest.raises(UserError, match="another version of the harness has written it"):
        train(cfg)
    assert {path: path.read_bytes() for path in (tmp_path / "checkpoints").iterdir()} == before
    assert load_model(cfg, checkpoint)


def test_another_data_set_is_refused_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    # Without a schedule nobody asks for the loaders before training starts.
    words = (*COMMON, *CONFIGURATIONS["constant rate, SGD"], "trainer.max_epochs=1")
    cfg = compose("train", [*words, f"run_dir={tmp_path}"])
    train(cfg)
    cfg.resume = str(tmp_path / "checkpoints" / "step_3.ckpt")
    logs = [tmp_path / "metrics.csv", *(tmp_path / "tensorboard").iterdir()]
    kept = [*logs, *(tmp_path / "checkpoints").iterdir()]
    before = {path: path.read_bytes() for path in kept}
    cfg.data.num_train = 1000
    with pytest.raises(UserError, match="num_samples=1250, and now it is 1000"):
        train(cfg)
    assert {path: path.read_bytes() for path in kept} == before


EVERY_3 = ("trainer.val_check_interval=3", "trainer.check_val_every_n_epoch=null")
EVERY_2ND = ("trainer.check_val_every_n_epoch=2", "trainer.limit_train_batches=3")


@pytest.mark.parametrize(
    ("settings", "long_seconds", "expected"),
    [
        ((), 0.0, [4, 9, 14, 15]),
        ((), 2.0, [4, 15]),
        (EVERY_3, 0.0, [2, 5, 8, 11, 14, 15]),
        (EVERY_2ND, 0.0, [5, 9]),
    ],
)
def test_checkpoint_is_written_before_a_validation_that_takes_long(
    settings: tuple[str, ...],
    long_seconds: float,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a signal in the middle of it. How long the first one takes is not known."""
    monkeypatch.setattr(safe_point, "LONG_SECONDS", long_seconds)
    cfg = compose("train", [*COMMON, *settings, f"run_dir={tmp_path}", "test=false"])
    cfg.checkpoint.every_n_steps = None
    train(cfg)
    steps = [int(path.stem.partition("_")[2]) for path in lookup.by_step(tmp_path / "checkpoints")]
    assert steps == expected
