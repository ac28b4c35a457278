"""A forward that a split changes is refused at its first call, which leaves no trace."""

import logging
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.errors import UserError
from harness.strategies.parallel_forward import ParallelForward
from tests_harness.strategies.test_module_zoo import ZOO, Net, made
from tests_harness.strategies.upstream_warnings import UPSTREAM_WARNINGS

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


def neighbours(m: Net, x: Tensor, edges: Tensor) -> Tensor:
    """One step of message passing between nodes (N, D); edges (E, 2)."""
    h = m.net(x)
    return h + torch.zeros_like(h).index_add(0, edges[:, 1] % len(h), h[edges[:, 0] % len(h)])


def sampled(m: Net, x: Tensor) -> Tensor:
    h, _ = m.rnn(x)
    return h + torch.randn_like(h)


def graph() -> list[Tensor]:
    return [torch.randn(8, D), torch.randint(0, 8, (8, 2))]


DEPARTING: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]], list[str]]] = {
    "time first": (
        lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, 4)),
        lambda: [torch.randn(T, B, D)],
        ["% off when 8 rows are split into 4 + 4", "batch_first=True", "modules=[rnn]"],
    ),
    "time first, with random numbers": (
        lambda: Net(sampled, rnn=nn.GRU(D, 4)),
        lambda: [torch.randn(T, B, D)],
        ["does not treat each row by itself"],
    ),
    "a mask of as many rows": (
        lambda: MaskedAttention(),
        lambda: [torch.randn(B, T, D), torch.eye(T)],
        ["fails on 4 of them: RuntimeError", "trainer.strategy.whole_inputs=[mask]"],
    ),
    "as many nodes as graphs": (
        lambda: Net(neighbours, **linear()),
        graph,
        ["does not treat each row by itself"],
    ),
    "a softmax over the batch": (
        lambda: Net(lambda m, x: m.net(x).softmax(0), **linear()),
        lambda: [torch.randn(B, D)],
        ["does not treat each row by itself", "strategy=ddp", "check_forward=false"],
    ),
    "a number of samples": (
        lambda: Net(lambda m, x: {"y": m.net(x), "n": len(x)}, **linear()),
        lambda: [torch.randn(B, D)],
        ["the output ['n'] is 50.00% off"],
    ),
    "a fixed batch size": (
        lambda: Net(lambda m, x: m.net(x.view(B, D)), **linear()),
        lambda: [torch.randn(B, D)],
        ["takes the 8 rows of the batch, and fails on 4 of them", "invalid for input"],
    ),
    "a list by sample": (
        lambda: Net(lambda m, x: list(m.net(x).expand(4, len(x), 4).transpose(0, 1)), **linear()),
        lambda: [torch.randn(B, D)],
        ["the output [0] is of another shape"],
    ),
}


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, attn_mask=mask)[0]
        return y


def test_what_no_number_can_tell_is_refused_with_what_to_type() -> None:
    for (make, inputs, words), training in product(DEPARTING.values(), (True, False)):
        torch.manual_seed(0)
        with pytest.raises(UserError) as error:
            split_call(make().train(training), *inputs())
        assert all(word in str(error.value) for word in words), str(error.value)
        assert len(str(error.value).splitlines()) <= 3


def queue(m: Net, x: Tensor) -> Tensor:
    y: Tensor = m.net(x)
    if m.training:
        m.queue.copy_(torch.cat([y.detach(), m.queue])[:16])
    return y


def codebook(m: Net, x: Tensor) -> Tensor:
    y: Tensor = m.net(x)
    m.mean = 0.9 * m.mean + 0.1 * y.detach().mean(0)  # another tensor, not the same changed
    return y


def first_batch(m: Net, x: Tensor) -> Tensor:
    """As an ActNorm sets its parameters from the first batch."""
    if m.training:
        m.shift.data.copy_(x.mean(0))
    y: Tensor = m.net(x)
    return y


def test_what_forward_writes_from_its_samples_is_refused() -> None:
    for forward, parts, says in (
        (queue, {"queue": torch.zeros(16, 4)}, "Buffer queue of Net"),
        (codebook, {"mean": torch.zeros(4), "drop": nn.Dropout(0.5)}, "Buffer mean of Net"),
        (first_batch, {"shift": nn.Parameter(torch.zeros(D))}, "Parameter shift of Net"),
    ):
        module = Net(forward, **linear(**parts))
        with pytest.raises(UserError) as error:
            split_call(module, torch.randn(B, D))
        assert f"{says} is written by forward() from its samples" in str(error.value)
        assert "only the first 4 would count" in str(error.value)
        assert "training_step after self(...)" in str(error.value)
        split_call(module.eval(), torch.randn(B, D))  # what evaluation keeps is nobody's


def test_an_attribute_that_forward_sets_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y: Tensor = m.net(x)
        m.penalty = y.square().mean()
        return y

    module = Net(forward, **linear())
    parallel = ParallelForward(module, [CPU] * 2)
    parallel.install()
    for _ in range(10):
        module(torch.randn(B, D))
    parallel.remove()
    assert caplog.text.count("forward() writes penalty of Net from its samples") == 1


def counted(m: Net, x: Tensor) -> Tensor:
    m.calls += 1
    m.average.lerp_(m.net.weight.detach(), 0.1)
    y: Tensor = m.net(x)
    return y


def test_what_treats_each_sample_alike_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transformer = nn.TransformerEncoderLayer(D, 2, 8, 0.3, batch_first=True)
    for module, training in product(
        (
            Net(counted, **linear(calls=torch.zeros(()), average=torch.zeros(4, D))),
            nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)),
            transformer,
            Net(lambda m, x: m.net(x) + torch.randn(len(x), 4), **linear()),
            Net(lambda m, x: F.gumbel_softmax(m.net(x)), **linear()),
        ),
        (True, False),
    ):
        x = torch.randn((B, 5, D) if module is transformer else (B, D))
        _, sizes = split_call(module.train(training), x)
        assert sizes == [4, 4]
    assert not caplog.records  # compared, and nothing to say


def test_every_kind_of_module_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for name in ZOO:
        module, inputs = made(name)
        split_call(module, *inputs, batch_sizes=())
        assert "was not compared" not in caplog.text, name


def test_what_cannot_be_compared_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for module in (
        nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        Net(lambda m, x: m.net(x) * (1 + random.random()), **linear()),
        Net(lambda m, x: m.net(x) * (1 + np.random.rand()), **linear()),
    ):
        caplog.clear()
        assert split_call(module, torch.randn(B, D))[1] == [4, 4]
        assert "was not compared with a whole one" in caplog.text


def test_want_of_memory_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        if len(x) == B:
            raise torch.OutOfMemoryError
        y: Tensor = m.net(x)
        return y

    assert split_call(Net(forward, **linear()), torch.randn(B, D))[1] == [4, 4]


def test_a_forward_that_needs_gradients_is_compared() -> None:
    """As a force field differentiates its energy; time-first would be 50 % off."""

    def forces(m: Net, x: Tensor) -> Tensor:
        return torch.autograd.grad(m.net(x).square().sum(), x, create_graph=True)[0]

    def mixed(m: Net, x: Tensor) -> Tensor:
        return torch.autograd.grad(m.net(x).mean().square(), x, create_graph=True)[0]

    x = torch.randn(B, D, requires_grad=True)
    assert split_call(Net(forces, **linear()), x)[1] == [4, 4]
    with pytest.raises(UserError, match="does not treat each row by itself"):
        split_call(Net(mixed, **linear()), x)


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
        (torch.bfloat16, False, 2e-2, 0.2),
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
