"""dp follows one device, step by step; whole runs under all strategies: tests/verdicts."""

import functools

import torch

from harness.strategies import parallel_forward
from tests.strategies.parity import BATCH_NORM, CASES, difference, train
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


@functools.cache
def one_device(name):
    return train(CASES[name], 1)


def test_dp_follows_one_device():
    cells = [(name, 2) for name in CASES]
    cells += [(name, n) for name in ("last batch of 10", "last batch of 1") for n in (3, 4)]
    for name, num_devices in cells:
        losses = train(CASES[name], num_devices)
        assert losses[-1] < losses[0], name
        assert difference(losses, one_device(name)) <= CASES[name].bound, (name, num_devices)


def test_batch_norm_differs_from_one_device():
    """Which is why it is left out of the parity cases."""
    assert difference(train(BATCH_NORM, 2), train(BATCH_NORM, 1)) > 1e-6


def test_a_lost_gradient_is_found(monkeypatch):
    """The bound can be missed: copies whose gradients do not come back fail it."""
    without_graph = torch.no_grad()(parallel_forward.copied)
    monkeypatch.setattr(parallel_forward, "copied", without_graph)
    assert difference(train(CASES["SGD"], 2), one_device("SGD")) > 100 * CASES["SGD"].bound
