"""Lets a step run without a trace in its module."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back what a step writes into a module: its tensors, and its modules' attributes."""
    tensors = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    attributes = [
        (part, {key: _copied(value) for key, value in vars(part).items() if key[0] != "_"})
        for part in module.modules()
    ]
    held = [(part, dict(part.named_buffers(recurse=False))) for part in module.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, buffers in held:
                for key, value in buffers.items():
                    setattr(part, key, value)
            for tensor, value in tensors:
                tensor.copy_(value)
        for part, values in attributes:
            for key, value in values.items():
                vars(part)[key] = value


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else value
