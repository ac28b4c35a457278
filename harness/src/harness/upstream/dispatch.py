"""Look at each collective of torch while a block runs.

What intercepts operations has a private module. Seen in torch 2.6 to 2.13;
``harness/tests/exact/test_gathering.py`` fails without.
"""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


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
