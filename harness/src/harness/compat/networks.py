"""Compile networks in place, and set the device that LightningModules report.

Up to torch 2.13, ``Module.compile`` silently does nothing for a class of torch itself, such as
``nn.Sequential`` (``harness/tests/features/test_speed.py``). ``torch.func.functional_call``
replaces parameters, but not ``LightningModule.device``
(``harness/tests/strategies/test_module_zoo.py``).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

NUM_SHAPES = 8  # per network, as torch's limit; more shapes run uncompiled


def compile_networks(networks: Sequence[nn.Module], is_split: bool = False) -> None:
    """Compile networks in place, at the first call with each input shape.

    By default torch compiles code for all shapes at the second shape. That code rounds differently,
    and a resumed run may see the shapes in another order.

    Args:
        networks: the networks to compile.
        is_split: whether a strategy splits their calls. If so, chunks have two sizes, and copied
            parameters, which are not leaves, need code of their own.
    """
    from torch._dynamo import config  # takes seconds

    num_shapes = NUM_SHAPES * (4 if is_split else 1)
    config.cache_size_limit = max(config.cache_size_limit, num_shapes * len(networks))
    for network in networks:
        compiled: Any = torch.compile(_call_of(network), dynamic=False)
        network._compiled_call_impl = compiled


def _call_of(network: nn.Module) -> Any:
    """Return a function that calls a network, because torch does not compile its own methods."""
    return lambda *args, **kwargs: network._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def computing_on(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Set ``device`` of all LightningModules in a module for this context."""
    modules = [child for child in module.modules() if isinstance(child, pl.LightningModule)]
    devices = [child.device for child in modules]
    try:
        for child in modules:
            child._device = device
        yield
    finally:
        for child, original in zip(modules, devices, strict=True):
            child._device = original
