"""Weights are verified before anything is computed with them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from harness import Run, UserError, evaluate, load_run, predict, train
from harness.command import choose_run
from tests.faults.damage import value_bytes
from tests.strategy_runs import write_conf
from tests.training.foreign import WithLoaders

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of few workers
MARK = "tested_last_weights"


def flip(path: Path) -> None:
    """Flip a bit of the exponent of a weight: torch loads it without a word."""
    data = bytearray(path.read_bytes())
    data[value_bytes(data, "/data/0")[3]] ^= 64
    path.write_bytes(data)


class Harm(pl.Callback):
    """Damages the best checkpoint of a run between its training and its test."""

    def on_fit_end(self, trainer: pl.Trainer, *_: Any) -> None:
        flip(Path(trainer.checkpoint_callback.best_model_path))  # type: ignore[union-attr]


class Halves(pl.Callback):
    """Halves the weights at the end of the training."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for weight in pl_module.parameters():
            weight.data *= 0.5


class Scaled(WithLoaders):
    """Computes with numbers that training has changed, and that are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.center, self.seen = 1.0, torch.zeros(2), list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale += 1
        self.center = self.center + 1
        self.seen.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"test_scale": self.scale, "test_center": self.center.sum()})
        return super().test_step(batch, batch_idx)


class Adapted(WithLoaders):
    """Trains an adapter, and saves it alone: what it adapts is made by the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.adapter, self.net.weight.data = torch.nn.Linear(5, 1), torch.ones(1, 5)
        self.net.requires_grad_(False)
        torch.nn.init.zeros_(self.net.bias)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) + self.adapter(batch[0]) - batch[1]).square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        weights = super().state_dict(*args, **kwargs)
        return {name: value for name, value in weights.items() if name.startswith("adapter")}


def training(folder: Path, model: str = "tests.training.foreign.WithLoaders") -> list[str]:
    """A training whose best weights, those of the largest loss, are its first."""
    words = write_conf(folder, model=f"_target_: {model}\n")
    words += ["data=null", "mode=max", "objective=val_loss", "logger=none", "trainer.max_epochs=3"]
    words += ["callbacks.progress_bar=null", "callbacks.learning_rate=null"]
    words += ["checkpoint.every_n_steps=3", "checkpoint.num_kept=9"]
    return [*words, f"output_dir={folder}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that no test changes."""
    return train(*training(tmp_path_factory.mktemp("trained")))


def loss_of(run: Run, name: str) -> float:
    return evaluate(run.folder / "checkpoints" / name).results["test_loss"]


def test_lost_best_checkpoint_gives_the_results_of_the_last_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*training(tmp_path), f"+callbacks.harm._target_={__name__}.Harm")
    assert json.loads((run.folder / "results.json").read_text())[MARK] is True
    assert run.results["test_loss"] == loss_of(run, "last.ckpt")
    assert run.results["test_loss"] < loss_of(run, "step_3.ckpt")
    screen = capsys.readouterr()
    assert "of the last weights" in screen.out
    log = (run.folder / "run.log").read_text()
    for said in (screen.err, log):
        assert "best.ckpt is lost: " in said
        assert "The results are those of the last weights" in said
    # The run's checkpoint is the tested one.
    assert run.checkpoint.name == "last.ckpt"
    assert run.model is not None
    assert "(of the last weights)" in choose_run.finished(run.folder)


def test_what_is_tested_has_the_numbers_that_it_had_with_these_weights(tmp_path: Path) -> None:
    """At the end of the training, later, and from Python."""
    run = train(*training(tmp_path, f"{__name__}.Scaled"))
    again, module = evaluate(run.checkpoint), load_run(run.folder).model
    assert again.results.items() <= run.results.items()
    assert module.scale == run.results["test_scale"] == 1 + 4  # the first of three epochs
    assert module.center.sum() == run.results["test_center"]
    assert not module.seen  # a new collection begins


def test_what_a_module_lets_checkpoints_lack_is_not_asked_for(tmp_path: Path) -> None:
    """Neither in the test, nor later, from Python, or on resume."""
    run = train(*training(tmp_path, f"{__name__}.Adapted"))
    assert [*weights(run)] == ["adapter.weight", "adapter.bias"]
    assert evaluate(run.checkpoint).results.items() <= run.results.items()
    assert torch.equal(load_run(run.folder).model.net.weight, torch.ones(1, 5))
    (run.folder / "results.json").unlink()  # as if it was killed in the test
    again = train(*training(tmp_path, f"{__name__}.Adapted"), "resume=auto")
    assert again.results["test_loss"] == run.results["test_loss"]


def test_pruned_weights_are_tested(tmp_path: Path) -> None:
    """While it trains, a pruned weight is an attribute, which a checkpoint keeps as a number."""
    prune = "pruning_fn: l1_unstructured, amount: 0.5, parameter_names: [weight]"
    prune = f"{{_target_: pytorch_lightning.callbacks.ModelPruning, {prune}}}"
    run = train(*training(tmp_path), f"+callbacks.prune={prune}", "mode=min")
    assert int((load_run(run.folder).model.net.weight == 0).sum()) == 4
    assert evaluate(run.checkpoint).results.items() <= run.results.items()


def weights(run: Run) -> dict[str, torch.Tensor]:
    last: Any = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)
    return last["state_dict"]


@pytest.mark.ci
def test_weights_that_hooks_set_at_the_end_are_saved_and_tested(
    trained: Run, tmp_path: Path
) -> None:
    words = [*training(tmp_path), f"+callbacks.halves._target_={__name__}.Halves"]
    run = train(*words)
    assert run.checkpoint.name == "last.ckpt"
    torch.testing.assert_close(weights(run), {n: w / 2 for n, w in weights(trained).items()})
    tested = run.results["test_loss"]
    assert tested == loss_of(run, "last.ckpt") == evaluate(run.folder).results["test_loss"]
    assert "Hooks have set the weights in on_train_end" in (run.folder / "run.log").read_text()
    (run.folder / "results.json").unlink()  # as if it was killed in the test
    again = train(*words, "resume=auto")
    assert again.folder == run.folder
    assert (again.results["test_loss"], again.checkpoint) == (tested, run.checkpoint)


def test_lightning_s_average_of_weights_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    average = "{_target_: pytorch_lightning.callbacks.StochasticWeightAveraging, swa_lrs: 0.1}"
    run = train(*training(tmp_path), f"+callbacks.swa={average}")
    last: Any = torch.load(run.checkpoint, weights_only=True)
    state = last["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
    torch.testing.assert_close(last["state_dict"], state, rtol=0, atol=0)
    assert run.results["test_loss"] == loss_of(run, "last.ckpt")


def test_damaged_weights_are_refused_and_those_without_checksums_taken(trained: Run) -> None:
    assert MARK not in trained.results
    path = trained.folder / "checkpoints" / "best.ckpt"
    whole = path.read_bytes()
    flip(path)
    flipped = path.read_bytes()
    uses: list[Callable[[], object]] = [partial(evaluate, path), partial(predict, path)]
    for use in (*uses, lambda: load_run(trained.folder).model):
        for damaged in (flipped, whole[:-500], b""):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"checkpoint={path} is .*damaged"):
                use()
    path.write_bytes(whole)
    saved = torch.load(path, weights_only=True)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(saved, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert loss_of(trained, "best.ckpt") == trained.results["test_loss"]
    assert trained.results["test_loss"] > loss_of(trained, "last.ckpt")
