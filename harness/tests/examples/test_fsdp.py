"""Parts of every parameter in each process: the same experiment, and files as of one device."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule

from harness.convert import convert
from tests.conftest import slow
from tests.faults.run_folder import leave_at
from tests.strategy_runs import (
    NO_FSDP,
    SAME,
    distances,
    execute,
    farthest,
    outcome,
    run_of,
)

pytestmark = pytest.mark.skipif(NO_FSDP, reason="this torch has no fsdp on CPUs")
STEP = 5  # of 4 in each of 2 epochs
TEXT = (  # a transformer whose blocks are in a ModuleList, with one matrix in two places
    *("experiment=text", "name=run", "data.batch_size=5", "trainer.limit_train_batches=4"),
    *("trainer.limit_val_batches=3", "trainer.limit_test_batches=3", "trainer.max_epochs=2"),
    *("data.length=16", "model.net.width=16", "+trainer.gradient_clip_val=0.1"),
    "model.groups={decay_norms:false}",  # another order of parameters than the module's
    *("checkpoint.every_n_steps=1", "checkpoint.num_kept=100"),
)


class Parts(pl.Callback):
    """Writes how much of the weights a process has, and torch's own folder of all parts."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size == 1 or (self.folder / "sharded").exists():
            return
        mine = sum(p.to_local().numel() for p in pl_module.parameters())  # type: ignore[operator]
        path = self.folder / f"rank_{dist.get_rank()}.json"
        blocks = [name for name, part in pl_module.named_modules() if isinstance(part, FSDPModule)]
        whole = sum(p.numel() for p in pl_module.parameters())
        path.write_text(json.dumps([mine, whole, blocks]))
        dcp.save(pl_module.state_dict(), checkpoint_id=self.folder / "sharded")


class Writes(pl.Callback):
    """Lets a part of the network write into its weights whenever it computes, as max_norm does."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        part = next(one for one in pl_module.modules() if isinstance(one, nn.Linear))

        def write(*_: Any) -> None:
            part.weight.data.mul_(0.5)

        part.register_forward_pre_hook(write)


def parts_in(folder: Path) -> list[str]:
    return [f"+callbacks.parts._target_={__name__}.Parts", f"+callbacks.parts.folder={folder}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run, whole, in one process and in parts."""
    found = {}
    for strategy in ("cpu", "fsdp(2)"):
        folder = tmp_path_factory.mktemp("trained")
        found[strategy] = run_of([*TEXT, *parts_in(folder)], strategy, folder)
    return found


@pytest.mark.ci
def test_a_run_is_that_of_one_process(trained: dict[str, Path]) -> None:
    assert_equal(outcome(trained["cpu"]), outcome(trained["fsdp(2)"]))


@pytest.mark.ci
def test_each_process_has_a_part_and_torch_and_the_converter_merge_them(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    folder = trained["fsdp(2)"].parents[1]
    sizes = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert sizes[0][0] + sizes[1][0] == sizes[0][1]
    assert sizes[0][2] == ["net.layers.0", "net.layers.1"]
    assert max(mine for mine, *_ in sizes) < 0.55 * sizes[0][1]
    dcp_to_torch_save(folder / "sharded", folder / "sharded.pth")
    for source in (folder / "sharded.pth", trained["fsdp(2)"] / "checkpoints" / "last.ckpt"):
        convert(source, tmp_path / f"{source.stem}.pt", prefix="net")
    merged, whole = (torch.load(tmp_path / f"{name}.pt") for name in ("sharded", "last"))
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("before", "after"),
    [("fsdp(2)", "fsdp(2)"), *slow(("fsdp(2)", "cpu"), ("cpu", "fsdp(2)"))],
)
def test_a_run_goes_on(before: str, after: str, trained: dict[str, Path], tmp_path: Path) -> None:
    """Bit-identical with the same number of ranks; otherwise equal to the whole run."""
    expected = outcome(trained[before])
    shutil.copytree(trained[before].parent, tmp_path / "run", symlinks=True)
    (run_dir,) = (tmp_path / "run").iterdir()
    leave_at(run_dir, STEP)
    parts = parts_in(trained[before].parents[1])
    run_of([*TEXT, *parts, f"resume={run_dir}"], after, tmp_path)
    if before == after:
        assert farthest(expected, outcome(run_dir)) == 0
    assert_equal(expected, outcome(run_dir))


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Weights but for the order of sums, and what is logged, in 32 bits, to seven digits."""
    apart = distances(a, b)
    assert {n: far for n, far in apart.items() if n.startswith("net.") and far > SAME} == {}
    sizes = {name: float(torch.as_tensor(value).abs().max()) for name, value in a.items()}
    assert {n: far for n, far in apart.items() if far > 1e-6 * sizes.get(n, 0.0)} == {}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["callbacks=ema"], "strategy=fsdp does not support averaged weights"),
        ([f"+callbacks.a._target_={__name__}.Writes"], "writes into parameters"),
        *slow((["trainer.strategy.modules=net.encoder"], "names net.encoder, and Language")),
    ],
)
def test_what_it_does_not_keep_is_refused(overrides: list[str], said: str, tmp_path: Path) -> None:
    status, told = execute([*TEXT, *overrides], "fsdp(2)", tmp_path)
    assert status == 1
    assert said in told
    assert "Traceback" not in told


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_gpus_train_as_one_and_go_on(precision: str, tmp_path: Path) -> None:
    """It has never been run."""
    found = {}
    for strategy in ("cpu", "fsdp(2)"):
        (folder := tmp_path / strategy.partition("(")[0]).mkdir()
        overrides = ["trainer.accelerator=gpu", f"trainer.precision={precision}"]
        overrides += ["strategy=gpu"] if strategy == "cpu" else []
        found[strategy] = outcome(run_of([*TEXT, *overrides], strategy, folder))
    bound = 1e-4 if precision == "32-true" else 2e-2
    assert farthest(found["cpu"], found["fsdp(2)"]) <= bound
    (run_dir,) = (tmp_path / "fsdp" / "run").iterdir()
    leave_at(run_dir, STEP)
    overrides = [f"resume={run_dir}", "trainer.accelerator=gpu", f"trainer.precision={precision}"]
    again = run_of(overrides, "fsdp(2)", tmp_path / "fsdp")
    assert farthest(found["fsdp(2)"], outcome(again)) <= bound
