"""Import torchmetrics without ``scipy.signal``, so that each process starts faster.

torchmetrics 1.6 to 1.9 imports ``scipy.signal`` to restore its ``hamming`` for SRMRpy, a package
that only an audio metric needs. The import takes a fifth of the time to import Lightning. This file
uses no private name. If it no longer saves an import, ``harness/tests/compat/test_quick_start.py``
fails.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

SKIPPED = "scipy.signal"


def import_torchmetrics() -> None:
    """Import torchmetrics while an empty module stands for ``scipy.signal``."""
    if {"torchmetrics", SKIPPED} & sys.modules.keys() or find_spec("srmrpy"):
        return
    import torch  # noqa: F401  # first, because it inspects all modules

    stand_in = sys.modules[SKIPPED] = ModuleType(SKIPPED)
    vars(stand_in)["hamming"] = None  # so that torchmetrics does not restore it
    try:
        import torchmetrics  # noqa: F401
    finally:
        del sys.modules[SKIPPED]
