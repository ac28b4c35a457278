"""Compile networks in place, and compute with exchanged parameters on another device.

``Module.compile`` of torch up to 2.13 does nothing, without a word, where the outermost class is
one of torch's own, such as ``nn.Sequential`` (``harness/tests/knobs/test_speed.py``).
``torch.func.functional_call`` exchanges parameters, and leaves the device that a LightningModule
notes for its forward (``harness/tests/strategies/test_module_zoo.py``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

NUM_SHAPES = 8  # torch's own limit, which all networks share; further shapes run uncompiled


def compile_networks(networks: Sequence[nn.Module], is_split: bool = False) -> None:
    """Compile networks at their first call, and anew for each shape of their inputs.

    Code for all shapes, which torch makes when it meets a second one, rounds otherwise than that
    for the first, and a resumed run meets them in another order.

    Args:
        networks: change in place.
        is_split: their calls are split: shares have two sizes, and copies of parameters, which are
            no leaves, have code of their own.
    """
    from torch._dynamo import config  # takes seconds

    num_shapes = NUM_SHAPES * (4 if is_split else 1)
    config.cache_size_limit = max(config.cache_size_limit, num_shapes * len(networks))
    for network in networks:
        compiled: Any = torch.compile(_call_of(network), dynamic=False)
        network._compiled_call_impl = compiled


def _call_of(network: nn.Module) -> Any:
    """Wrap what calling a network does in a function; torch would skip its own method."""
    return lambda *args, **kwargs: network._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def computing_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the LightningModules among a module and its submodules name `device` as theirs."""
    parts = [part for part in module.modules() if isinstance(part, pl.LightningModule)]
    before = [part.device for part in parts]
    try:
        for part in parts:
            part._device = device
        yield
    finally:
        for part, original in zip(parts, before, strict=True):
            part._device = original
