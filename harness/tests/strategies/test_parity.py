"""dp and ddp2 follow one device; whole runs under all strategies: tests/verdicts."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torchmetrics.classification import MulticlassAccuracy

from harness.strategies import parallel_forward
from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from tests.conftest import slow
from tests.strategies.parity import (
    CASES,
    UPSTREAM_WARNINGS,
    Batches,
    Case,
    Module,
    difference,
    train,
    trainer,
)

pytestmark = UPSTREAM_WARNINGS


def test_dp_follows_one_device():
    for name, case in CASES.items():
        expected = train(case, 1)
        for num_devices in (2, 3, 4) if "last" in name else (2,):
            losses = train(case, num_devices)
            assert losses[-1] < losses[0], name
            assert difference(losses, expected) <= case.bound, (name, num_devices)


def test_a_lost_gradient_is_found(monkeypatch):
    """The bound can be missed: copies whose gradients do not come back fail it."""
    expected = train(Case(), 1)
    without_graph = torch.no_grad()(parallel_forward.copied)
    monkeypatch.setattr(parallel_forward, "copied", without_graph)
    assert difference(train(Case(), 2), expected) > 100 * Case().bound


class Watched(Module):
    """Notes what the step and each share of forward see; its loss compares all samples."""

    def __init__(self):
        super().__init__(Case())
        self.steps, self.shares, self.metric = [], [], MulticlassAccuracy(5, average="micro")

    def forward(self, x):
        self.shares.append(len(x))  # the replicas share a list of numbers
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.steps.append((len(x), len(logits)))
        z = F.normalize(logits, dim=1)
        loss = F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))
        self.metric(logits, y)
        self.log("loss", loss)
        self.log("accuracy", self.metric, on_step=False, on_epoch=True)
        return loss


def logged(strategy, devices):
    torch.manual_seed(0)
    module = Watched()
    t = trainer(strategy, devices=devices, max_steps=3, precision="64-true")
    t.fit(module, Batches(30, 30, 10))
    return module, [t.callback_metrics[key].item() for key in ("loss", "accuracy")]


@pytest.mark.parametrize("strategy", [DataParallelStrategy, *slow(DDP2Strategy)])
def test_the_step_runs_once_on_the_whole_batch_and_forward_on_shares(strategy):
    module, values = logged(strategy(), 2)
    assert values == pytest.approx(logged("auto", 1)[1], abs=1e-12)
    assert module.steps == [(30, 30), (30, 30), (10, 10)]
    assert module.shares == [15, 15, 15, 15, 5, 5]
    assert list(module.state_dict()) == list(Module(Case()).state_dict())
    assert module.forward.__func__ is Watched.forward  # given back at teardown


STARTS = {
    "one device": lambda: ("auto", 1),
    "dp": lambda: (DataParallelStrategy(), 2),
    "ddp": lambda: (DDPStrategy(process_group_backend="gloo"), 1),
    "ddp2": lambda: (DDP2Strategy(), 2),
}


def test_a_checkpoint_of_any_strategy_resumes_under_another(tmp_path):
    case = Case(optimizer=torch.optim.Adam)

    def fit(start, num_steps, checkpoint=None):
        strategy, devices = STARTS[start]()
        torch.manual_seed(0)
        module = Module(case)
        t = trainer(strategy, devices=devices, max_steps=num_steps)
        t.fit(module, Batches(24), ckpt_path=checkpoint, weights_only=True)
        return t, module

    expected = fit("one device", 8)[1].losses[4:]
    for first, second in pairwise([*STARTS, "one device"]):
        half, module = fit(first, 4)
        half.save_checkpoint(tmp_path / "half.ckpt")
        assert all(key.startswith("net.") for key in module.state_dict())
        resumed = fit(second, 8, tmp_path / "half.ckpt")[1]
        assert resumed.losses == pytest.approx(expected, abs=1e-6), second
