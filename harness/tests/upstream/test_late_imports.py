"""A run starts without what torchmetrics imports for plots, which are drawn all the same."""

import subprocess
import sys

from tests.conftest import ROOT

START = """
import sys
from harness.upstream import late_imports
late_imports.import_torchmetrics()
from harness.run import train
late = [name for name in late_imports.ASKED if name in sys.modules]
assert not late, late
"""
USES = """
import torch, torchmetrics
from torchmetrics.classification import MulticlassAccuracy
metric = MulticlassAccuracy(3)
metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
figure, axes = metric.plot()
import matplotlib.pyplot as plt
assert plt.style.context("default")
assert isinstance(figure, plt.Figure)
assert isinstance(axes, torchmetrics.utilities.plot.matplotlib.axes.Axes)
assert metric.plot(ax=axes)[1] is axes
from matplotlib import colors
assert colors.to_rgb("red") == (1, 0, 0)
import scipy.signal
assert scipy.signal.butter(2, 0.1)
"""


def test_what_was_left_out_is_there_when_it_is_used() -> None:
    script = "import warnings; warnings.simplefilter('ignore')\n" + START + USES
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
