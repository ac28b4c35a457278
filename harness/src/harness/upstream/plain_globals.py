"""What torch builds of a checkpoint without running code, by the names that a file gives.

Torch lists it for ``torch.load(weights_only=True)`` and tells nobody. Seen in torch 2.13;
``harness/tests/checkpoints/test_unpickling.py`` reads every kind of tensor through it.
"""

from typing import Any

from torch._weights_only_unpickler import _get_allowed_globals

PRIVATE = {"torch._weights_only_unpickler": "_get_allowed_globals"}


def plain_globals() -> dict[str, Any]:
    """Types, functions and constants such as ``torch.float32``, by module and name."""
    allowed: dict[str, Any] = _get_allowed_globals()
    return allowed
