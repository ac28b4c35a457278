"""Spares the start of each process ``scipy.signal``, which torchmetrics imports for one old name.

torchmetrics 1.6 to 1.9 gives ``scipy.signal.hamming`` back to SRMRpy, a package that only a metric
of audio needs. That import takes a fifth of all that Lightning's takes. Uses nothing private.
``harness/tests/upstream/test_quick_start.py`` fails where it spares nothing any more.
"""

import sys
from importlib.util import find_spec
from types import ModuleType

SPARED = "scipy.signal"


def import_torchmetrics() -> None:
    """Import torchmetrics, with a stand-in for ``scipy.signal`` while that takes place."""
    if {"torchmetrics", SPARED} & sys.modules.keys() or find_spec("srmrpy"):
        return
    import torch  # noqa: F401  # before there is a stand-in, for it looks at all modules

    stand_in = sys.modules[SPARED] = ModuleType(SPARED)
    vars(stand_in)["hamming"] = None  # so that torchmetrics does not look for it
    try:
        import torchmetrics  # noqa: F401
    finally:
        del sys.modules[SPARED]
