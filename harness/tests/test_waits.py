"""A mode on the CPU counts operations that would synchronise with a GPU, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.waits import HostWaits

WAITS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda x, y: x[0].item(),
    "float": lambda x, y: float(x.sum()),
    "if": lambda x, y: 1 if x.sum() > 0 else 0,
    "f-string": lambda x, y: f"{x.sum():.3f}",
    "repr": lambda x, y: repr(x),
    "slice": lambda x, y: x[: y[0]],
    "number": lambda x, y: x[y[1]],
    "list": lambda x, y: x[[0, 1]],
    "mask": lambda x, y: x[x > 0],
    "set mask": lambda x, y: x.clone().__setitem__(x > 0, x[:1].expand(3)),
    "places": lambda x, y: torch.where(x > 0),
    "one_hot": lambda x, y: F.one_hot(y),
    "as_tensor": lambda x, y: torch.as_tensor(2.0, device=x.device),
    "cpu": lambda x, y: x.cpu(),
}
PASSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": lambda x, y: (x * 2).sum(),
    "fill a mask": lambda x, y: x.clone().__setitem__(x > 0, 0.0),
    "choose": lambda x, y: torch.where(x > 0, x, 0.0),
    "one_hot": lambda x, y: F.one_hot(y, 9),
    "index": lambda x, y: x[y],
    "slice": lambda x, y: x[:2],
    "full": lambda x, y: torch.full((), 2.0, device=x.device),
}


def found(function: Callable[[Tensor, Tensor], Any]) -> list[str]:
    names = list[str]()
    x, y = torch.ones(3), torch.tensor([1, 2, 0])
    with HostWaits(names.append):
        function(x, y)
    return names


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_counted(name: str) -> None:
    assert len(found(WAITS[name])) >= 1


@pytest.mark.parametrize("name", PASSES)
def test_what_the_device_does_alone_is_not(name: str) -> None:
    assert found(PASSES[name]) == []
