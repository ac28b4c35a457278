"""Frozen layers stay bit-identical; runs resume before and after they are unfrozen."""

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import UserError
from harness.init.freezing import Freezing
from tests.conftest import slow
from tests.faults.run_folder import contents, differences, leave_at
from tests.init.modules import FineTuned
from tests.strategy_runs import farthest, outcome, run_of, write_conf

BACKBONE = "init.freeze=[net.backbone]"


def train(folder: Path, *words: str, strategy: str = "cpu") -> Path:
    """Train in five steps an epoch, for three; the checkpoint of every step is kept."""
    groups = {
        "data": "_target_: tests.modules.data.Data\ndataset: Flowers\n",
        "model": "_target_: tests.init.modules.FineTuned\n",
    }
    folder.mkdir(exist_ok=True)
    chosen = [*write_conf(folder, **groups), "name=run", "test=false"]
    often = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=100")
    return run_of([*chosen, *often, *words], strategy, folder)


def checkpoint(run_dir: Path, step: int) -> dict[str, Any]:
    path = run_dir / "checkpoints" / f"step_{step}.ckpt"
    found: dict[str, Any] = torch.load(path, weights_only=False)
    return found


def backbone(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    state = checkpoint(run_dir, step)["state_dict"]
    return {name: value for name, value in state.items() if "backbone" in name}


@pytest.mark.parametrize("strategy", ["cpu", *slow("dp(2)", "ddp(2)")])
def test_parts_thaw_at_their_epoch_and_runs_go_on_around_it(strategy: str, tmp_path: Path) -> None:
    run_dir = train(tmp_path, BACKBONE, "init.unfreeze_at_epoch=1", strategy=strategy)
    first, last, after = (backbone(run_dir, step) for step in (1, 5, 6))
    assert len(first) == 7
    assert all(torch.equal(value, first[name]) for name, value in last.items())
    assert last["net.backbone.1.num_batches_tracked"] == 0
    assert not any(torch.equal(value, after[name]) for name, value in last.items())
    assert "of which 27 are trained" in (tmp_path / "said_0.txt").read_text()
    for step, num in ((5, 2), (6, 6)):  # an optimizer has no state of what was frozen
        (state,) = checkpoint(run_dir, step)["optimizer_states"]
        assert len(state["state"]) == num
        assert sum(len(group["params"]) for group in state["param_groups"]) == 6
    expected = contents(run_dir)
    for step in (6, 5, 4):
        leave_at(run_dir, step)
        run_of([f"resume={run_dir}"], strategy, tmp_path)
        assert differences(expected, contents(run_dir)) == [], step


@pytest.mark.ci
@pytest.mark.parametrize("strategy", ["ddp(2)", *slow("dp(2)", "ddp2(2x2)")])
def test_what_is_frozen_for_good_ends_alike_under_every_strategy(
    strategy: str, tmp_path: Path
) -> None:
    words = [BACKBONE, "trainer.max_epochs=2"]
    # dp refuses it, and what is frozen has no need of it; under ddp it puts other layers in place.
    words += ["trainer.sync_batchnorm=true"] if strategy == "ddp(2)" else []
    one = outcome(train(tmp_path / "one", *words))
    assert farthest(one, outcome(train(tmp_path / "many", *words, strategy=strategy))) < 1e-9


def test_single_parameters_are_parts_and_what_cannot_be_frozen_is_refused() -> None:
    module = FineTuned()
    Freezing(["net.head.bias"]).freeze(module)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["net.head.bias"]
    with pytest.raises(UserError, match="leaves nothing to train"):
        Freezing(["net"]).freeze(FineTuned())
