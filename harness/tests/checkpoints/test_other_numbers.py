"""Logged values continue with another number of ranks, in the middle of an epoch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from tests.conftest import slow
from tests.faults.run_folder import leave_at
from tests.modules.classifiers import Classifier
from tests.strategy_runs import SAME, distances, execute, outcome, run_of, write_conf

STEP = 7  # of 5 in each of 3 epochs


class Seen(Metric):
    """A metric as users write them, which torchmetrics does not merge."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, batch: Tensor) -> None:
        self.number += len(batch)

    def compute(self) -> Tensor:
        return self.number


class Synchronised(Classifier):
    """Logs with ``sync_dist=True`` wherever one can, and counts what it has seen."""

    def on_fit_start(self) -> None:
        self.seen = Seen()

    def on_train_epoch_start(self) -> None:
        self.log("epoch/start", float(self.current_epoch), sync_dist=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(batch[0])
        self.log("epoch/mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        most = {"reduce_fx": "max", "on_step": False, "on_epoch": True}
        self.log("epoch/most", batch[0].max(), **most, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch/end", 1.0, sync_dist=True)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("before", "after"), [("ddp(2)", "cpu"), *slow(("cpu", "ddp(2)"), ("ddp(2)", "ddp(3)"))]
)
def test_values_that_are_synchronised_go_on(before: str, after: str, tmp_path: Path) -> None:
    groups = {
        "data": "_target_: tests.modules.data.Data\ndataset: Flowers\n",
        "model": f"_target_: {__name__}.Synchronised\n",
    }
    chosen = [*write_conf(tmp_path, **groups), "name=run", "test=false"]
    chosen += ["checkpoint.every_n_steps=1", "checkpoint.num_kept=100"]
    run_dir = run_of(chosen, before, tmp_path)
    expected = outcome(run_dir)
    leave_at(run_dir, STEP)
    status, said = execute([*chosen, f"resume={run_dir}"], after, tmp_path)
    assert status == 0, said
    is_told = (
        "cannot be merged, so only rank 0's counts continue: seen."
        in (run_dir / "run.log").read_text()
    )
    assert is_told == (before == "ddp(2)")
    apart = distances(expected, outcome(run_dir))
    # A step logs the mean of the shares, which need not be even.
    assert [n for n, far in apart.items() if far > SAME and not n.endswith("_step")] == []
