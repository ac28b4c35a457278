"""Comparing a split call with a whole one leaves no trace in the module or in what is drawn."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from harness.strategies.parallel_forward import ParallelForward
from tests_harness.strategies.test_comparison import CPU, B, D
from tests_harness.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


class Everything(nn.Module):
    """Has whatever a call could change, and draws from whatever there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.frozen = nn.BatchNorm1d(4).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.metric, self.seen = MeanMetric(), set[int]()
        self.recent, self.lengths = deque[int](), list[int]()
        self.number, self.table = 0, {"calls": 0}
        self.generator = torch.Generator().manual_seed(0)
        self.arrays = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        self.table["calls"] += 1
        self.metric(x.mean())
        self.seen.add(len(self.seen))
        self.recent.append(len(x))
        self.lengths.append(len(x))
        x.add_(0.0 * torch.rand(1, generator=self.generator)).mul_(2)
        self.arrays.random()
        y: Tensor = self.frozen(checkpoint(self.net, x, use_reentrant=True))
        return y


def state(module: Everything) -> list[Any]:
    return [
        [t.tolist() for t in module.state_dict().values()],
        [part.training for part in module.modules()],
        (module.metric.mean_value.tolist(), module.metric.update_count),
        str((module.seen, module.recent, module.lengths, module.number, module.table)),
        module.generator.get_state().tolist(),
        str(module.arrays.bit_generator.state),
        (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
    ]


# Checkpointing says so of the call whose inputs need no gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("training", [True, False])
def test_a_trial_leaves_no_trace(training: bool) -> None:
    torch.manual_seed(0)
    module, x = Everything().train(training), torch.randn(B, D)
    parallel = ParallelForward(module, [CPU] * 2)
    before, rows = state(module), x.clone()
    assert parallel.comparison is not None
    assert parallel.comparison.compare((x,), {}, [B])
    assert state(module) == before
    assert torch.equal(x, rows)
    module(x)
    assert state(module) != before


def test_outputs_and_gradients_are_those_without_a_trial_by_bit() -> None:
    found = []
    for check in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        parallel = ParallelForward(module, [CPU] * 2, check=check)
        parallel.install()
        x = torch.randn(B, D)
        for _ in range(11):
            module(x).square().sum().backward()
        parallel.remove()
        grads = [p.grad for p in module.parameters()]
        found.append([*grads, *module.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
