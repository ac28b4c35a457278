"""Processes agree on what is trained, whatever is frozen and unfrozen.

That they end as one process does is shown by the cells of ``tests/modules``.
"""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ddp as lightning_ddp
from torch import nn

from harness.checkpoints.lookup import by_step
from harness.strategies import ddp
from tests.conftest import slow
from tests.faults.run_folder import contents, differences, leave_at
from tests.strategy_runs import TIMED_OUT, execute, write_conf


def train(folder: Path, module: str) -> tuple[int, str, Path]:
    """Train a module of ``unfrozen`` in two processes, five steps an epoch; all steps are kept."""
    groups = {
        "data": "_target_: tests.modules.data.Data\ndataset: Flowers\n",
        "model": f"_target_: tests.modules.unfrozen.{module}\n",
    }
    chosen = [*write_conf(folder, **groups), "name=run", "test=false"]
    chosen += ["checkpoint.every_n_steps=1", "checkpoint.num_kept=100"]
    status, said = execute(chosen, "ddp(2)", folder)
    (run_dir,) = (folder / "run").iterdir()
    return status, said, run_dir


@pytest.mark.ci
@pytest.mark.parametrize(
    ("module", "at"), [("ByCallback", (5,)), *slow(("ByCallback", (7, 4)), ("ByHooks", (11, 4, 3)))]
)
def test_a_run_goes_on_around_the_moment_of_unfreezing(
    module: str, at: tuple[int, ...], tmp_path: Path
) -> None:
    """Stopped before it, at it, after it, and again after another one; bit-identical."""
    status, said, run_dir = train(tmp_path, module)
    assert status == 0, said
    expected = contents(run_dir)
    for step in at:
        leave_at(run_dir, step)
        status, said = execute([f"resume={run_dir}"], "ddp(2)", tmp_path)
        assert status == 0, said
        assert differences(expected, contents(run_dir)) == [], step


@pytest.mark.ci
def test_what_one_process_unfreezes_alone_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives of the processes do not match: torch's time-out ends the run."""
    short = property(lambda _: timedelta(seconds=4))  # the runs are forks of this process
    monkeypatch.setattr(ddp.DDPStrategy, "_timeout", short, raising=False)
    status, said, run_dir = train(tmp_path, "OnOneRank")
    assert status not in (0, TIMED_OUT), said
    # Whichever process times out first closes its connection, and the other may see that first.
    assert "Timed out" in said or "remote worker crashing" in said
    assert by_step(run_dir / "checkpoints")[-1].name == "step_3.ckpt"


def test_ddp_is_built_on_the_stream_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain torch builds it; else Lightning's own way is needed no more to be avoided."""
    module = pl.LightningModule()
    module.layer = nn.Linear(2, 2)
    streams, built = [], []

    class Built(nn.Module):
        def __init__(self, module: nn.Module, device_ids: Any, **_: Any) -> None:
            super().__init__()
            built.append(device_ids)

    monkeypatch.setattr(lightning_ddp, "DistributedDataParallel", Built)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: streams.append(1) or nullcontext())
    for kind, num_streams in ((pl.strategies.DDPStrategy, 1), (ddp.DDPStrategy, 0)):
        streams.clear()
        monkeypatch.setattr(kind, "root_device", torch.device("cuda", 0))
        strategy = kind(parallel_devices=[torch.device("cuda", 0)])
        strategy.model = strategy._lightning_module = module
        strategy.configure_ddp()
        assert len(streams) == num_streams, kind
        assert strategy.determine_ddp_device_ids() == [0]  # for NCCL's barriers
    assert built == [[0], None]
