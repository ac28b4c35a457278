"""Compiles networks in place, so that neither attributes nor the names of weights change.

``Module.compile`` of torch up to 2.13 does nothing, without a word, where the outermost class is
one of torch's own, such as ``nn.Sequential``. ``harness/tests/knobs/test_speed.py`` looks at both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

IS_TORCH_2_6 = torch.__version__.startswith("2.6.")
LIMIT = "cache_size_limit" if IS_TORCH_2_6 else "recompile_limit"
PRIVATE = {
    "torch.nn:Module()": "_call_impl _compiled_call_impl",
    "torch._dynamo.config": LIMIT,
}
NUM_SHAPES = 8  # torch's own limit, which all networks share; further shapes run uncompiled


def compile_networks(networks: Sequence[nn.Module], is_split: bool = False) -> None:
    """Compile networks at their first call, and anew for each shape of their inputs.

    Code for all shapes, which torch makes when it meets a second one, rounds otherwise than that
    for the first, and a run that goes on meets them in another order.

    Args:
        networks: change in place.
        is_split: their calls are split: shares have two sizes, and copies of parameters, which are
            no leaves, have code of their own.
    """
    from torch._dynamo import config  # takes seconds

    num_shapes = NUM_SHAPES * (4 if is_split else 1)
    setattr(config, LIMIT, max(getattr(config, LIMIT), num_shapes * len(networks)))
    for network in networks:
        compiled: Any = torch.compile(_call_of(network), dynamic=False)
        network._compiled_call_impl = compiled


def _call_of(network: nn.Module) -> Any:
    """A function that does what calling a network does; torch would skip its own method."""
    return lambda *args, **kwargs: network._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
