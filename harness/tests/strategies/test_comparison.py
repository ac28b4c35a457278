"""A forward that a split changes is refused at its first call, which leaves no trace."""

import logging
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from harness.errors import UserError
from harness.strategies.parallel_forward import ParallelForward
from tests.strategies.test_module_zoo import ZOO, Net, made
from tests.strategies.upstream_warnings import UPSTREAM_WARNINGS

pytestmark = UPSTREAM_WARNINGS
CPU = torch.device("cpu")
B, T, D = 8, 8, 6  # as many steps of time as samples


def linear(**parts: Any) -> dict[str, Any]:
    return {"net": nn.Linear(D, 4), **parts}


def split_call(
    module: nn.Module, *args: Any, batch_sizes: tuple[int, ...] = (B,), **kwargs: Any
) -> Any:
    """Outputs of one call of a module that is split over two devices, and how it was split."""
    parallel = ParallelForward(module, [CPU] * 2)
    parallel.batch_sizes = batch_sizes
    parallel.install()
    try:
        return module(*args, **kwargs), parallel.last_sizes
    finally:
        parallel.remove()


def test_what_no_number_can_tell_is_refused_with_what_to_type() -> None:
    for make, shape, words in (
        (
            lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, 4)),
            (T, B, D),  # time first
            ["% off when 8 rows are split into 4 + 4", "batch_first=True", "modules=[rnn]"],
        ),
        (
            lambda: Net(lambda m, x: m.net(x).softmax(0), **linear()),
            (B, D),
            ["does not treat each row by itself", "strategy=ddp", "check_forward=false"],
        ),
        (
            lambda: Net(lambda m, x: {"y": m.net(x), "n": len(x)}, **linear()),
            (B, D),
            ["the output ['n'] is 50.00% off"],
        ),
    ):
        for training in (True, False):
            torch.manual_seed(0)
            with pytest.raises(UserError) as error:
                split_call(make().train(training), torch.randn(shape))
            assert all(word in str(error.value) for word in words), str(error.value)
            assert len(str(error.value).splitlines()) <= 3


def first_batch(m: Net, x: Tensor) -> Tensor:
    """As an ActNorm sets its parameters from the first batch."""
    if m.training:
        m.shift.data.copy_(x.mean(0))
    y: Tensor = m.net(x)
    return y


def test_what_forward_writes_from_its_samples_is_refused() -> None:
    module = Net(first_batch, **linear(shift=nn.Parameter(torch.zeros(D))))
    with pytest.raises(UserError) as error:
        split_call(module, torch.randn(B, D))
    says = "Parameter shift of Net is written by forward() from its samples"
    assert says in str(error.value)
    assert "only the first 4 would count" in str(error.value)
    split_call(module.eval(), torch.randn(B, D))  # what evaluation keeps is nobody's


def counted(m: Net, x: Tensor) -> Tensor:
    m.calls += 1
    m.average.lerp_(m.net.weight.detach(), 0.1)
    y: Tensor = m.net(x)
    return y


def test_what_treats_each_sample_alike_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for module in (
        Net(counted, **linear(calls=torch.zeros(()), average=torch.zeros(4, D))),
        nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
        Net(lambda m, x: m.net(x) + torch.randn(len(x), 4), **linear()),
        Net(lambda m, x: F.gumbel_softmax(m.net(x)), **linear()),
    ):
        assert split_call(module, torch.randn(B, D))[1] == [4, 4]
    assert not caplog.records  # compared, and nothing to say
    for name in ZOO:
        module, inputs = made(name)
        split_call(module, *inputs, batch_sizes=())
        assert "was not compared" not in caplog.text, name


def test_what_cannot_be_compared_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for module in (
        nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        Net(lambda m, x: m.net(x) * (1 + random.random()), **linear()),
    ):
        caplog.clear()
        assert split_call(module, torch.randn(B, D))[1] == [4, 4]
        assert "was not compared with a whole one" in caplog.text


def test_a_network_that_begins_with_zeros_is_compared_again() -> None:
    module = Net(lambda m, x: m.scale * m.net(x).softmax(0), **linear(scale=torch.zeros(())))
    parallel = ParallelForward(module, [CPU] * 2)
    parallel.install()
    x = torch.randn(B, D)
    for _ in range(9):
        module(x)
    module.scale += 1
    with pytest.raises(UserError, match="does not treat each row by itself"):
        module(x)
    parallel.remove()


def test_rounding_is_no_difference() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y: Tensor = m.net(x)
        return y * (1 + m.off * (len(x) == B))

    for dtype, is_mixed, rounding, fault in (
        (torch.float64, False, 1e-8, 1e-4),
        (torch.float32, False, 1e-4, 1e-2),
        (torch.float32, True, 2e-2, 0.2),
    ):
        module, x = Net(forward, **linear()).to(dtype), torch.randn(B, D, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            module.off = rounding
            assert split_call(module, x)[1] == [4, 4]
            module.off = fault
            with pytest.raises(UserError, match="does not treat each row by itself"):
                split_call(module, x)


def test_a_module_that_means_it_can_say_so() -> None:
    module = Net(lambda m, x: m.net(x).softmax(0), **linear())
    parallel = ParallelForward(module, [CPU] * 2, check=False)
    parallel.install()
    total = module(torch.randn(B, D)).sum().item()
    assert total == pytest.approx(8)  # each half sums to 1 in each of 4 columns
    parallel.remove()


class Everything(nn.Module):
    """Has what a call could change, and draws from whatever there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.metric, self.recent, self.lengths = MeanMetric(), deque[int](), list[int]()
        self.table, self.arrays = {"calls": 0}, np.random.default_rng(0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.table["calls"] += 1
        self.metric(x.mean())
        self.recent.append(len(x))
        self.lengths.append(len(x))
        x.add_(0.0 * torch.rand(1, generator=self.generator)).mul_(2)
        self.arrays.random()
        y: Tensor = checkpoint(self.net, x, use_reentrant=True)
        return y


def state(module: Everything) -> list[Any]:
    return [
        [t.tolist() for t in module.state_dict().values()],
        (module.metric.mean_value.tolist(), module.metric.update_count),
        str((module.recent, module.lengths, module.table, module.arrays.bit_generator.state)),
        module.generator.get_state().tolist(),
        (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
    ]


# Checkpointing says so of the call whose inputs need no gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_comparison_leaves_no_trace() -> None:
    for training in (True, False):
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
