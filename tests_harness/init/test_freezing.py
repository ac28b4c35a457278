"""Frozen parts stay as they are by bit; runs go on around the moment at which they thaw."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.checkpoints.lookup import by_step
from harness.errors import UserError
from harness.init.freezing import Freezing
from tests_harness.faults.run_folder import contents, differences, leave_at
from tests_harness.init.modules import FineTuned
from tests_harness.strategy_runs import execute, farthest, outcome, write_conf

BACKBONE = "init.freeze=[net.backbone]"


def train(folder: Path, *words: str, strategy: str = "cpu") -> Path:
    """Train in five steps an epoch, for three; the checkpoint of every step is kept."""
    groups = {
        "data": "_target_: tests_harness.modules.data.Data\ndataset: Flowers\n",
        "model": "_target_: tests_harness.init.modules.FineTuned\n",
    }
    folder.mkdir(exist_ok=True)
    chosen = [*write_conf(folder, **groups), "name=run", "test=false"]
    often = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=100")
    status, said = execute([*chosen, *often, *words], strategy, folder)
    assert status == 0, said
    (run_dir,) = (folder / "run").iterdir()
    return run_dir


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    path = run_dir / "checkpoints" / f"step_{step}.ckpt"
    state = torch.load(path, weights_only=False)["state_dict"]
    return {name: value for name, value in state.items() if "backbone" in name}


def test_frozen_parts_and_their_batch_norm_do_not_change(tmp_path: Path) -> None:
    run_dir = train(tmp_path, BACKBONE)
    first, last = weights(run_dir, 1), weights(run_dir, 15)
    assert len(first) == 7
    assert all(torch.equal(value, last[name]) for name, value in first.items())
    assert first["net.backbone.1.num_batches_tracked"] == 0
    assert "of which 27 are trained" in (tmp_path / "said.txt").read_text()


@pytest.mark.parametrize("strategy", ["cpu", "dp(2)", "ddp(2)"])
def test_parts_thaw_at_their_epoch_and_runs_go_on_around_it(strategy: str, tmp_path: Path) -> None:
    run_dir = train(tmp_path, BACKBONE, "init.unfreeze_at_epoch=1", strategy=strategy)
    before, at, after = (weights(run_dir, step) for step in (1, 5, 6))
    assert all(torch.equal(value, before[name]) for name, value in at.items())
    assert not any(torch.equal(value, after[name]) for name, value in at.items())
    expected = contents(run_dir)
    for step in (8, 6, 5, 4):
        leave_at(run_dir, step)
        status, said = execute([f"resume={run_dir}"], strategy, tmp_path)
        assert status == 0, said
        assert differences(expected, contents(run_dir)) == [], step


@pytest.mark.parametrize("strategy", ["dp(2)", "ddp(2)", "ddp2(2x2)"])
def test_what_is_frozen_for_good_ends_alike_under_every_strategy(
    strategy: str, tmp_path: Path
) -> None:
    words = [BACKBONE, "trainer.max_epochs=2"]
    # dp refuses it, and what is frozen has no need of it; under ddp it puts other layers in place.
    words += ["trainer.sync_batchnorm=true"] if strategy == "ddp(2)" else []
    one = outcome(train(tmp_path / "one", *words))
    assert farthest(one, outcome(train(tmp_path / "many", *words, strategy=strategy))) < 1e-9


def test_norms_without_parameters_thaw_too() -> None:
    """Nothing of them is trained; what they count is."""
    module = FineTuned()
    module.net.backbone = nn.Sequential(nn.BatchNorm1d(6, affine=False))
    freezing, trainer = Freezing(["net.backbone"], 1), SimpleNamespace(current_epoch=0)
    freezing.freeze(module)
    freezing.on_train_start(trainer, module)  # type: ignore[arg-type]
    module.train()
    freezing.on_train_batch_start(trainer, module)  # type: ignore[arg-type]
    assert not module.net.backbone[0].training
    trainer.current_epoch = 1
    freezing.on_train_batch_start(trainer, module)  # type: ignore[arg-type]
    assert module.net.backbone[0].training


def test_unfrozen_parts_learn_what_other_steps_have_not_seen(tmp_path: Path) -> None:
    """Nothing of an optimizer's state is there for them before."""
    run_dir = train(tmp_path, BACKBONE, "init.unfreeze_at_epoch=2")
    for step, num in ((10, 2), (11, 6)):
        path = run_dir / "checkpoints" / f"step_{step}.ckpt"
        (state,) = torch.load(path, weights_only=False)["optimizer_states"]
        assert len(state["state"]) == num
        assert sum(len(group["params"]) for group in state["param_groups"]) == 6
    assert len(by_step(run_dir / "checkpoints")) == 15


def test_single_parameters_are_parts_too() -> None:
    module = FineTuned()
    Freezing(["net.head.bias"]).freeze(module)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["net.head.bias"]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (["net.backbon"], "there is no net.backbon. Did you mean net.backbone?"),
        (["loss"], "there is no loss. There is net, net.backbone, net.head."),
        (["net"], "freezes every parameter, and nothing is left to train"),
    ],
)
def test_what_cannot_be_frozen_is_refused(parts: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        Freezing(parts).freeze(FineTuned())
