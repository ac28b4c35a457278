"""Lets a module compute with exchanged parameters and buffers on their device.

``torch.func.functional_call`` exchanges them. A LightningModule also notes its device, which its
forward asks for, and which has no public setter. Seen in Lightning 2.6;
``harness/tests/strategies/test_module_zoo.py`` fails without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytorch_lightning as pl
import torch
from torch import nn

PRIVATE = {"pytorch_lightning:LightningModule()": "_device"}


@contextmanager
def computing_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the LightningModules among a module and its submodules be on `device`."""
    parts = [part for part in module.modules() if isinstance(part, pl.LightningModule)]
    before = [part.device for part in parts]
    try:
        for part in parts:
            part._device = device
        yield
    finally:
        for part, original in zip(parts, before, strict=True):
            part._device = original
