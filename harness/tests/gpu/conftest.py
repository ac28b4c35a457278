"""The cases need the template's experiments, and end with a line of their own."""

import time
from typing import Any

import pytest
import torch
from pytorch_lightning import __version__ as lightning

from tests.conftest import ROOT, TEST_DEVICE

STARTED = time.monotonic()
# The small project has few; `make test-gpu` of the template names its own folder.
if not (ROOT / "conf" / "experiment" / "images.yaml").is_file():
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    stats = terminalreporter.stats
    if "gpu" not in config.option.markexpr or hasattr(config, "workerinput"):
        return
    counts = ", ".join(f"{len(stats.get(k, ()))} {k}" for k in ("passed", "failed", "skipped"))
    errors = len(stats.get("error", ()))
    num = torch.cuda.device_count() if TEST_DEVICE == "cuda" else 0
    device = f"{num} x {torch.cuda.get_device_name(0)}" if num else "no GPU"
    terminalreporter.write_line(
        f"make test-gpu: {counts}{f', {errors} errors' * bool(errors)} in "
        f"{time.monotonic() - STARTED:.0f} s; {device}, torch {torch.__version__}, "
        f"Lightning {lightning}",
        bold=True,
    )
