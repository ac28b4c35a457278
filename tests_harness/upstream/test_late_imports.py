"""A run starts without what torchmetrics imports for plots, which are drawn all the same."""

import subprocess
import sys

import pytest

from harness.upstream import late_imports
from tests_harness.conftest import ROOT, slow

START = """
import sys
from harness.upstream import late_imports
late_imports.import_torchmetrics()
from harness.run import tasks
late = [name for name in late_imports.ASKED if name in sys.modules]
assert not late, late
"""
USES = {
    "a plot": """
import torch
from torchmetrics.classification import MulticlassAccuracy
metric = MulticlassAccuracy(3)
metric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
figure, axes = metric.plot()
import matplotlib.pyplot as plt
assert isinstance(figure, plt.Figure)
assert isinstance(axes, torchmetrics.utilities.plot.matplotlib.axes.Axes)
assert metric.plot(ax=axes)[1] is axes
""",
    "pyplot": "import matplotlib.pyplot as plt; assert plt.style.context('default')",
    "colours and signals": """
from matplotlib import colors
assert colors.to_rgb("red") == (1, 0, 0)
import scipy.signal
assert scipy.signal.butter(2, 0.1)
""",
}


def program(*lines: str) -> None:
    script = "import warnings; warnings.simplefilter('ignore')\n" + "\n".join(lines)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("use", USES)
def test_what_was_left_out_is_there_when_it_is_used(use: str) -> None:
    program(START, "import torchmetrics", USES[use])


@pytest.mark.parametrize("first", [*slow("import matplotlib"), "import matplotlib.axes"])
def test_modules_that_are_there_already_stay(first: str) -> None:
    program(first, START.replace("assert not late, late", ""), """
import matplotlib.pyplot as plt, torchmetrics
assert torchmetrics.utilities.plot.plt is plt
""")  # fmt: skip


def test_nothing_happens_where_torchmetrics_is_there() -> None:
    import torchmetrics  # noqa: F401  # as in most programs of tests

    before = dict(sys.modules)
    late_imports.import_torchmetrics()
    assert dict(sys.modules) == before
