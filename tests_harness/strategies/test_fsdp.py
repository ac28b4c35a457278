"""Parts of every parameter in each process: the same experiment, and files as of one device."""

import json
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from harness import UserError
from harness.convert import convert
from harness.strategies.fsdp import units
from tests_harness.faults.run_folder import leave_at
from tests_harness.strategy_runs import SAME, STRATEGIES, execute, farthest, outcome

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
        mine = sum(p.to_local().numel() for p in pl_module.parameters())  # type: ignore[operator]
        path = self.folder / f"rank_{dist.get_rank()}.json"
        path.write_text(json.dumps([mine, sum(p.numel() for p in pl_module.parameters())]))
        dcp.save(pl_module.state_dict(), checkpoint_id=self.folder / "sharded")


def run_of(folder: Path, strategy: str, *words: str) -> Path:
    status, said = execute([*TEXT, *words], strategy, folder)
    assert status == 0, said
    (run_dir,) = (folder / "run").iterdir()
    return run_dir


def test_each_process_has_a_part_and_the_converter_merges_them(tmp_path: Path) -> None:
    callback = [f"+callbacks.parts._target_={__name__}.Parts", f"+callbacks.parts.folder={tmp_path}"]
    run_dir = run_of(tmp_path, "fsdp(2)", *callback)
    sizes = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert sizes[0][0] + sizes[1][0] == sizes[0][1]
    assert max(mine for mine, _ in sizes) < 0.55 * sizes[0][1]
    for source in (tmp_path / "sharded", run_dir / "checkpoints" / "last.ckpt"):
        convert(source, tmp_path / f"{source.stem}.pt", prefix="net", ema=False)
    merged, whole = (torch.load(tmp_path / f"{name}.pt") for name in ("sharded", "last"))
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("before", "after", "bound"),
    [("fsdp(2)", "fsdp(2)", 0.0), ("fsdp(2)", "cpu", SAME), ("ddp(3)", "fsdp(2)", SAME)],
)
def test_a_run_goes_on(before: str, after: str, bound: float, tmp_path: Path) -> None:
    """By bit with as many processes, where dropout draws too; else as the whole run on one."""
    words = ["model.net.dropout=0.1"] if before == after else []
    expected = outcome(run_of(tmp_path, before, *words))
    (run_dir,) = (tmp_path / "run").iterdir()
    leave_at(run_dir, STEP)
    status, said = execute([*TEXT, *words, f"resume={run_dir}"], after, tmp_path)
    assert status == 0, said
    assert farthest(expected, outcome(run_dir)) <= bound


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["callbacks=ema"], "strategy=fsdp has no averaged weights"),
        (
            ["trainer.precision=16-mixed", "model.optimizer.fused=false"],
            "strategy=fsdp has no trainer.precision=16-mixed",
        ),
        (["trainer.strategy.modules=[net.encoder]"], "there is no net.encoder in LanguageModel"),
    ],
)
def test_what_it_does_not_keep_is_refused(words: list[str], said: str, tmp_path: Path) -> None:
    status, told = execute([*TEXT, *words], "fsdp(2)", tmp_path)
    assert status == 1
    assert said in told
    assert "Traceback" not in told


class Tied(nn.Module):
    """Two networks that share a matrix, blocks of their own, and a parameter of no part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.reads, self.writes = nn.Linear(4, 4), nn.Linear(4, 4)
        self.writes.weight = self.reads.weight
        self.net = nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.GELU()]), nn.Linear(4, 4))


def test_units_are_blocks_then_networks_and_never_share_a_parameter() -> None:
    module = Tied()
    assert list(units(module)) == [module.net[0][0], module.net]  # type: ignore[index]
    assert list(units(module, blocks=False)) == [module.net]
    assert list(units(module, ["net.1"])) == [module.net[1]]
    with pytest.raises(UserError, match="there is no nets in Tied"):
        list(units(module, ["nets"]))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_gpus_train_as_one_and_go_on(precision: str, tmp_path: Path) -> None:
    """Nobody has run it."""
    found = {}
    for strategy in ("cpu", "fsdp(2)"):
        (folder := tmp_path / strategy.partition("(")[0]).mkdir()
        words = ["trainer.accelerator=gpu", f"trainer.precision={precision}"]
        words += ["strategy=gpu"] if strategy == "cpu" else []
        found[strategy] = outcome(run_of(folder, strategy, *words))
    bound = 1e-4 if precision == "32-true" else 2e-2
    assert farthest(found["cpu"], found["fsdp(2)"]) <= bound
    (run_dir,) = (tmp_path / "fsdp" / "run").iterdir()
    leave_at(run_dir, STEP)
    words = [f"resume={run_dir}", "trainer.accelerator=gpu", f"trainer.precision={precision}"]
    status, said = execute(words, "fsdp(2)", tmp_path / "fsdp")
    assert status == 0, said
    assert farthest(found["fsdp(2)"], outcome(run_dir)) <= bound
    assert STRATEGIES["fsdp(2)"]
