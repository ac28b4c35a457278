"""The user's module does not notice that its forward is split."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.strategies import DDPStrategy
from torchmetrics.classification import MulticlassAccuracy

from harness.strategies.ddp2 import DDP2Strategy
from harness.strategies.dp import DataParallelStrategy
from harness.strategies.parallel_forward import reseed_like_seeded
from tests.conftest import slow
from tests.strategies.parity import Batches, Case, Module
from tests.strategies.test_misuse import trainer
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


class Watched(Module):
    """Notes what the step and each share of forward see."""

    def __init__(self, case=None):
        super().__init__(case or Case())
        self.steps, self.shares, self.metric = [], [], MulticlassAccuracy(5, average="micro")

    def forward(self, x):
        self.shares.append(len(x))  # the replicas share a list of numbers
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        forwards = getattr(self.trainer.strategy, "parallel_forwards", None)
        self.steps.append((len(x), len(logits), forwards and forwards[0].last_sizes))
        loss = F.cross_entropy(logits, y)
        self.metric(logits, y)
        self.log("loss", loss)
        self.log("accuracy", self.metric, on_step=False, on_epoch=True)
        return loss


@pytest.mark.parametrize("strategy", [DataParallelStrategy, DDP2Strategy])
def test_the_step_runs_once_on_the_whole_batch_and_forward_on_shares(strategy):
    torch.manual_seed(0)
    module = Watched()
    keys, net = list(module.state_dict()), module.net
    t = trainer(strategy(), max_steps=3)
    t.fit(module, Batches(30, 30, 10))
    torch.manual_seed(0)
    alone = trainer("auto", devices=1, max_steps=3)
    alone.fit(Watched(), Batches(30, 30, 10))
    logged, expected = (
        [t.callback_metrics[k].item() for k in ("loss", "accuracy")] for t in (t, alone)
    )
    assert logged == pytest.approx(expected, abs=1e-6)
    assert module.steps == [(30, 30, [15, 15]), (30, 30, [15, 15]), (10, 10, [5, 5])]
    assert module.shares == [15, 15, 15, 15, 5, 5]
    assert list(module.state_dict()) == keys
    assert module.net is net
    assert module.forward.__func__ is Watched.forward  # given back at teardown


class Pairs(Module):
    """A loss over all pairs of the batch, which no mean over shares can replace."""

    def training_step(self, batch, batch_idx):
        z = F.normalize(self(batch[0]), dim=1)
        loss = F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))
        self.losses.append(loss.item())
        return loss


def losses(module, strategy, devices=2, **kwargs):
    torch.manual_seed(0)
    module = module()
    trainer(strategy, devices=devices, **{"max_steps": 6} | kwargs).fit(module, Batches(30, 30, 10))
    return module.losses


@pytest.mark.parametrize("strategy", [DataParallelStrategy, *slow(DDP2Strategy)])
def test_a_loss_over_the_whole_batch_is_that_of_one_device(strategy):
    case = Case(precision="64-true")
    expected = losses(lambda: Pairs(case), "auto", devices=1, precision="64-true")
    actual = losses(lambda: Pairs(case), strategy(), precision="64-true")
    assert actual == pytest.approx(expected, abs=1e-12)


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


def test_generators_seeded_alike_are_separated_once_and_again_after_a_new_seed():
    generators = [torch.Generator() for _ in range(3)]

    def draws():
        return [torch.rand(1, generator=g).item() for g in generators]

    runs = []
    for _ in range(2):
        for generator in generators:
            generator.manual_seed(5)  # as torch.manual_seed(5) does for every GPU
        reseed_like_seeded(generators)
        first = draws()
        reseed_like_seeded(generators)  # changes nothing
        runs.append(first + draws())
    assert len(set(runs[0])) == 6
    assert runs[0] == runs[1]
    assert runs[0][0] == torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
