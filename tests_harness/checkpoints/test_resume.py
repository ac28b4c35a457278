"""A run goes on from any step as if it had never stopped."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import lookup, safe_point, writing
from harness.checkpoints.safe_point import SafePoint
from harness.command.compose import compose
from harness.exact import seeded_steps
from harness.upstream import logged_values, resume_counters, resume_states
from harness.upstream.resume_counters import position_in
from tests_harness.faults.resume_sweep import COMMON, CONFIGURATIONS, DATA, sweep, train, words_on

IN_DEFAULT_SUITE = {
    "dropout, OneCycle",
    "every kind of log",
    "what authors keep",
    "all together",
}
DEFAULT = sorted(IN_DEFAULT_SUITE)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CONFIGURATIONS.keys() - set(DEFAULT)]


@pytest.mark.parametrize("name", [*DEFAULT, *SLOW])
def test_resume_from_every_step_equals_the_run_by_bit(name: str, tmp_path: Path) -> None:
    found = dict(sweep(name, tmp_path))
    assert len(found) >= 7
    assert {step: differences for step, differences in found.items() if differences} == {}


THIRD = [
    "ReduceLROnPlateau",
    "early stopping",
    "batches that fit",
    "a log per two steps, accumulation",
]


@pytest.mark.parametrize("name", THIRD)
def test_resume_from_every_third_step_equals_the_run_by_bit(name: str, tmp_path: Path) -> None:
    """The quick look at what the test above sees to the end; in step with no epoch's length."""
    found = dict(sweep(name, tmp_path, stride=3))
    assert len(found) >= 3
    assert {step: differences for step, differences in found.items() if differences} == {}


@pytest.mark.parametrize("name", DATA)
def test_resume_on_every_kind_of_data_equals_the_run_by_bit(name: str, tmp_path: Path) -> None:
    found = dict(sweep(words_on(name, tmp_path / "data"), tmp_path / "runs", stride=3))
    assert len(found) >= 3
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


@pytest.mark.parametrize("name", REPAIRS)
def test_repair_is_needed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where Lightning mends what is repaired here: the repair can then go."""
    module, function, replacement, configuration = REPAIRS[name]
    monkeypatch.setattr(module, function, replacement)
    try:
        is_equal = not any(differences for _, differences in sweep(configuration, tmp_path))
    except Exception:  # what a missing repair leads to is Lightning's affair
        is_equal = False
    assert not is_equal


def test_checkpoints_load_as_plain_values_with_their_position(tmp_path: Path) -> None:
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "checkpoint.every_n_steps=4"])
    train(cfg)
    steps = [path.stem for path in lookup.by_step(tmp_path / "checkpoints")]
    assert steps == ["step_4", "step_8", "step_12", "step_15"]
    checkpoint = torch.load(tmp_path / "checkpoints" / "step_8.ckpt", weights_only=True)
    assert position_in(checkpoint, batches_per_step=1) == (1, 3)
    assert checkpoint["loaders"][0]["settings"]["num_samples"] == 1250
    assert (tmp_path / "checkpoints" / "last.ckpt").resolve().stem == "step_15"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    train(compose("train", [*COMMON, f"run_dir={tmp_path}", "checkpoint.num_kept=2"]))
    steps = [path.stem for path in lookup.by_step(tmp_path / "checkpoints")]
    assert steps == ["step_14", "step_15"]


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


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_checkpoint_that_another_version_has_pickled_is_gone_on_with(tmp_path: Path) -> None:
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "trainer.max_epochs=1"])
    train(cfg)
    results = (tmp_path / "results.json").read_text()
    checkpoint = tmp_path / "checkpoints" / "step_3.ckpt"
    for later in lookup.by_step(checkpoint.parent)[3:]:
        later.unlink()
    content = torch.load(checkpoint, weights_only=True)
    content["pytorch-lightning_version"] = "2.4.0"
    torch.save(content, checkpoint, pickle_protocol=4)
    cfg.resume = str(checkpoint)
    train(cfg)
    assert (tmp_path / "results.json").read_text() == results


def test_another_data_set_is_refused_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    from harness.errors import UserError

    # Without a schedule nobody asks for the loaders before training starts.
    words = (*COMMON, *CONFIGURATIONS["constant rate, SGD"], "trainer.max_epochs=1")
    cfg = compose("train", [*words, f"run_dir={tmp_path}"])
    train(cfg)
    cfg.resume = str(tmp_path / "checkpoints" / "step_3.ckpt")
    logs = [tmp_path / "metrics.csv", *(tmp_path / "tensorboard").iterdir()]
    kept = [*logs, *(tmp_path / "checkpoints").iterdir(), *(tmp_path / "code").iterdir()]
    before = {path: path.read_bytes() for path in kept}
    cfg.data.num_train = 1000
    with pytest.raises(UserError, match="num_samples=1250, and now it is 1000"):
        train(cfg)
    assert {path: path.read_bytes() for path in kept} == before


def test_full_disk_stops_a_run_that_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "on_full_disk=stop"])
    original = writing.write

    def write(file: Any, pieces: Any) -> None:
        if "step_3.ckpt" in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file, pieces)

    monkeypatch.setattr(writing, "write", write)
    with pytest.raises(SystemExit) as stop:
        train(cfg)
    assert stop.value.code == 1
    # One or two more are tried; the disk may have room again.
    assert lookup.by_step(tmp_path / "checkpoints")[-1].stem in ("step_4", "step_5")


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("trainer.val_check_interval=2",),
        ("trainer.val_check_interval=0.4", "trainer.accumulate_grad_batches=3"),
        ("trainer.val_check_interval=3", "trainer.check_val_every_n_epoch=null"),
        ("trainer.check_val_every_n_epoch=2", "trainer.limit_train_batches=3"),
    ],
)
def test_step_before_a_validation_is_known(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is written there, for a signal in the middle of a long validation."""
    told, done = set(), set()
    follows = resume_counters.validation_follows

    def tell(trainer: Any, batch_idx: int) -> bool:
        if answer := follows(trainer, batch_idx):
            told.add(trainer.global_step + 1)
        return answer

    def validate(self: Any, trainer: Any, *_: Any) -> None:
        done.add(trainer.global_step)

    monkeypatch.setattr(resume_counters, "validation_follows", tell)
    monkeypatch.setattr(SafePoint, "on_validation_start", validate)
    monkeypatch.setattr(SafePoint, "on_validation_end", nothing)
    cfg = compose("train", [*COMMON, *settings, f"run_dir={tmp_path}", "checkpoint.num_kept=2"])
    cfg.checkpoint.every_n_steps, cfg.test = None, False
    train(cfg)
    assert len(done) >= 1
    assert told == done


def test_checkpoint_is_written_before_a_validation_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long the first one takes is not known; the second one was measured."""
    monkeypatch.setattr(safe_point, "LONG_SECONDS", 0.0)
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "test=false"])
    cfg.checkpoint.every_n_steps = None
    train(cfg)
    steps = [path.stem for path in lookup.by_step(tmp_path / "checkpoints")]
    assert steps == ["step_4", "step_9", "step_14", "step_15"]


def test_short_validations_cost_one_checkpoint(tmp_path: Path) -> None:
    cfg = compose("train", [*COMMON, f"run_dir={tmp_path}", "test=false"])
    cfg.checkpoint.every_n_steps = None
    train(cfg)
    steps = [path.stem for path in lookup.by_step(tmp_path / "checkpoints")]
    assert steps == ["step_4", "step_15"]
