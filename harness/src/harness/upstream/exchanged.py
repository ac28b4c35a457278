"""Lets a module compute with other tensors than its own, on another device.

``torch.func.functional_call`` exchanges parameters and buffers. An RNN lists its weights besides,
and a LightningModule notes its device, which forward asks for; neither has a public setter. Seen in
torch 2.6 to 2.13; ``harness/tests/strategies/test_module_zoo.py`` fails without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from torch import nn

PRIVATE = {
    "harness.upstream.exchanged:example()": "_flat_weights _flat_weights_names",
    "pytorch_lightning:LightningModule()": "_device",
}


def example() -> nn.RNN:
    """A module whose attributes are looked up."""
    return nn.RNN(1, 1)


@contextmanager
def computing_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let RNNs use the exchanged weights, and LightningModules be on `device`."""
    before: list[tuple[nn.Module, str, object]] = []
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            before.append((part, "_flat_weights", part._flat_weights))
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]
        elif isinstance(part, pl.LightningModule):
            before.append((part, "_device", part.device))
            part._device = device
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)
