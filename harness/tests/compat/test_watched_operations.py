"""Operations are seen before they write, and dropout drops nothing."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.compat.watched_operations import WatchedOperations


def nothing(*_: Any) -> None:
    pass


DROPPING = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "of channels": lambda x: F.dropout1d(x, 0.5),
    "as on a GPU": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "depth": lambda x: x * x.new_empty(4, 1).bernoulli_(0.25).div_(0.25),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_keeps_everything_and_its_gradient(name: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with WatchedOperations(nothing, nothing) as watch:
        y = DROPPING[name](x)
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(y, x)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 6))
    assert (watch.has_dropout, watch.has_drawn) == (True, False)


def test_dropout_of_attention_and_recurrent_layers_keeps_everything() -> None:
    x = torch.randn(2, 3, 4, 8)
    lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    with WatchedOperations(nothing, nothing) as watch:
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        encoded = lstm(x[0])[0]
    assert (watch.has_dropout, watch.has_drawn) == (True, False)
    assert torch.allclose(attended, F.scaled_dot_product_attention(x, x, x), atol=1e-6)
    assert torch.allclose(encoded, lstm.eval()(x[0])[0], atol=1e-6)


@pytest.mark.parametrize("is_used", [False, True])
def test_dropout_that_evaluates_is_none(is_used: bool) -> None:
    layer = nn.Dropout(0.5).train(is_used)
    with WatchedOperations(nothing, nothing) as watch:
        layer(torch.ones(3))
    assert watch.has_dropout == is_used


def test_other_draws_are_seen() -> None:
    with WatchedOperations(nothing, nothing) as watch:
        torch.ones(3).add(1)
        assert not watch.has_drawn
        torch.randn(3)
    assert watch.has_drawn


def test_what_is_written_is_seen_before() -> None:
    """By methods, by functions of several tensors, behind ``.data``, through a view, and out=."""
    seen: list[tuple[int, float]] = []
    tensors = [torch.zeros(2) for _ in range(6)]

    def before_write(tensor: Tensor) -> None:
        seen.append((tensor.untyped_storage().data_ptr(), float(tensor.reshape(-1)[0])))

    with WatchedOperations(before_write, nothing):
        tensors[0].add_(1)
        torch._foreach_add_(tensors[1:2], 1)
        tensors[2].data.mul_(0).add_(1)
        tensors[3][:1] = 1
        torch.add(torch.ones(2), 0, out=tensors[4])
        F.batch_norm(torch.ones(3, 2), tensors[5], torch.zeros(2), training=True, momentum=1.0)
    places = [place for place, _ in seen]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= {*places}
    assert {value for _, value in seen} == {0.0}
    assert all(float(tensor[0]) == 1 for tensor in tensors)
