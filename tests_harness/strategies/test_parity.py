"""Every strategy follows one device, step by step; docs/strategies.md has the figures."""

import functools

import pytest
import torch

from harness.strategies.replica import Replica
from tests_harness.strategies import parity
from tests_harness.strategies.parity import BATCH_NORM, CASES, difference, train
from tests_harness.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS


@functools.cache
def one_device(name):
    return train(CASES[name], "one device")


def test_dp_follows_one_device():
    cells = [(name, "dp(2)") for name in CASES]
    cells += [
        (name, f"dp({n})") for name in ("last batch of 10", "last batch of 1") for n in (3, 4)
    ]
    for name, strategy in cells:
        losses = train(CASES[name], strategy)
        assert losses[-1] < losses[0], name
        assert difference(losses, one_device(name)) <= CASES[name].bound, (name, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp(2)", "ddp2(2x2)"])
def test_two_processes_follow_one_device(strategy, tmp_path):
    losses = parity.measure(strategy, tmp_path)
    for name, case in CASES.items():
        assert difference(losses[name], one_device(name)) <= case.bound, name

    # BatchNorm sees a device's share, whichever strategy made it.
    same_shares = train(BATCH_NORM, {"ddp(2)": "dp(2)", "ddp2(2x2)": "dp(4)"}[strategy])
    assert difference(losses["BatchNorm"], same_shares) <= 1e-12


def test_batch_norm_differs_from_one_device():
    """Which is why it is left out of the parity cases."""
    assert difference(train(BATCH_NORM, "dp(2)"), train(BATCH_NORM, "one device")) > 1e-6


def test_a_lost_gradient_is_found(monkeypatch):
    """The bound can be missed: replicas whose gradients do not come back fail it."""
    refresh = Replica.refresh
    monkeypatch.setattr(Replica, "refresh", lambda *args: torch.no_grad()(refresh)(*args))
    assert difference(train(CASES["SGD"], "dp(2)"), one_device("SGD")) > 100 * CASES["SGD"].bound
