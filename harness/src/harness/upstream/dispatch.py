"""Look at each operation of torch while a block runs: at random draws, and at collectives.

torch tags its random operations publicly; what intercepts operations has a private module. Seen in
torch 2.6 to 2.13; ``harness/tests/exact`` (test_first_batch_check, test_gathering) fails without.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Let each random operation of torch give numbers that depend on no generator.

    All samples of a batch get the same ones, so those of a share are those of the whole batch:
    rising ones along the features, ones of a ``bernoulli``, the identity of a permutation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_missed = False  # an operation with several results

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and replace what it has drawn."""
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        if not isinstance(result, Tensor):
            self.has_missed = True
            return result
        name = func.__name__
        if "randperm" in name:
            return result.copy_(torch.arange(len(result)))
        if not result.is_floating_point():
            return result.fill_(args[0] if name == "randint.low" else 0)
        if "bernoulli" in name or not result.numel():
            return result.fill_(1.0)
        features = result.shape[1:] if result.dim() else result.shape
        row = torch.linspace(0.1, 0.9, features.numel()).reshape(features)
        return result.copy_(row if features.numel() > 1 else torch.full_like(row, 0.5))


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Call a function before each collective of ``torch.distributed``, whoever begins it."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refuse = refuse

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at an operation, then run it."""
        if func.namespace.strip("_").startswith("c10d"):
            self.refuse()
        return func(*args, **(kwargs or {}))
