"""Compiles networks in place, so that neither attributes nor the names of weights change.

``Module.compile`` of torch up to 2.13 does nothing, without a word, where the outermost class is
one of torch's own, such as ``nn.Sequential``. ``harness/tests/knobs/test_speed.py`` looks at both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from harness.upstream.versions import IS_TORCH_2_6

LIMIT = "cache_size_limit" if IS_TORCH_2_6 else "recompile_limit"
PRIVATE = {
    "torch.nn:Module()": "_call_impl _compiled_call_impl",
    "torch._dynamo.config": LIMIT,
}
NUM_SHAPES = 8  # torch's own limit, which all networks share; what is more runs as it is


def compile_networks(networks: Sequence[nn.Module], is_split: bool = False) -> None:
    """Compile networks at their first call, and for each shape of their inputs anew.

    Where calls are split, shares have two sizes, and those of copies are compiled by themselves:
    their parameters are no leaves.

    What torch makes for all shapes, once it meets a second one, rounds otherwise than what it made
    for the first. A run that goes on meets them in another order.
    """
    from torch._dynamo import config  # seconds

    num_shapes = NUM_SHAPES * (4 if is_split else 1)
    setattr(config, LIMIT, max(getattr(config, LIMIT), num_shapes * len(networks)))
    for network in networks:
        compiled: Any = torch.compile(called(network), dynamic=False)
        network._compiled_call_impl = compiled


def called(network: nn.Module) -> Callable[..., Any]:
    """A function that does what calling a network does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return network._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call
