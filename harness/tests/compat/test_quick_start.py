"""The start of a process, without what torchmetrics needs for other packages."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from harness.compat.quick_start import import_torchmetrics
import_torchmetrics()
import pytorch_lightning
assert "scipy.signal" not in sys.modules
import scipy.signal
assert scipy.signal.windows.hann(3).tolist() == [0, 1, 0]
"""


@pytest.mark.slow
def test_scipy_signal_is_imported_by_those_who_use_it() -> None:
    """Lightning starts without it, and a later import gets all of it."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
