"""What an evaluation draws is a function of the batch: not of workers, processes or a restart."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import slow
from tests.faults.run_folder import contents, differences, leave_at
from tests.modules.classifiers import Classifier
from tests.strategy_runs import SAME, execute, farthest, outcome, run_of, write_conf


class Noisy(Classifier):
    """Draws in its evaluation alone, before it and for each batch."""

    def on_validation_epoch_start(self) -> None:
        self.shift = torch.rand((), dtype=torch.float64)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x + self.shift + 0.1 * torch.randn_like(x))
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True, sync_dist=True)


def train(folder: Path, strategy: str, *words: str) -> tuple[list[str], Path]:
    folder.mkdir()
    groups = {
        "data": "_target_: tests.modules.data.OwnData\ndataset: Flowers\nnum_workers: 0\n",
        "model": f"_target_: {__name__}.Noisy\n",
    }
    chosen = [*write_conf(folder, **groups), "name=run", "test=false"]
    chosen += ["trainer.val_check_interval=2", "checkpoint.every_n_steps=1"]
    chosen += ["checkpoint.num_kept=100", *words]
    return chosen, run_of(chosen, strategy, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("noisy") / "alone", "cpu")[1]


@pytest.mark.parametrize(
    ("strategy", "words"), [("ddp(2)", ("data.num_workers=1",)), *slow(("ddp(3)", ()))]
)
def test_evaluation_draws_the_same(
    strategy: str, words: tuple[str, ...], alone: Path, tmp_path: Path
) -> None:
    _, run_dir = train(tmp_path / "run", strategy, *words)
    assert farthest(outcome(run_dir), outcome(alone)) < SAME


@pytest.mark.parametrize("step", [3, *slow(1, 7)])
def test_run_that_goes_on_evaluates_what_it_would_have(step: int, tmp_path: Path) -> None:
    """Its workers are new ones, and to start them torch draws a number."""
    _, run_dir = train(tmp_path / "run", "cpu", "data.num_workers=2")
    expected = contents(run_dir)
    leave_at(run_dir, step)
    status, said = execute([f"resume={run_dir}"], "cpu", tmp_path)
    assert status == 0, said
    assert differences(expected, contents(run_dir)) == []
