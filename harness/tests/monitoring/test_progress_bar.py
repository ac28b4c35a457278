"""The progress bar, and a debugger that needs the screen."""

import pdb
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from harness.monitoring.progress_bar import ProgressBar


def test_a_breakpoint_ends_the_bar_and_stops_where_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if stdout were a terminal
    happened: list[Any] = []
    debugger = SimpleNamespace(set_trace=lambda frame: happened.append(frame.f_code.co_name))
    monkeypatch.setattr(pdb, "Pdb", lambda: debugger)
    bar = ProgressBar()
    trainer: Any = SimpleNamespace(is_global_zero=True)
    bar.setup(trainer, SimpleNamespace(), "fit")  # type: ignore[arg-type]
    bar.progress = SimpleNamespace(stop=lambda: happened.append("stop"))  # type: ignore[assignment]
    breakpoint()
    assert happened == ["stop", sys._getframe().f_code.co_name]
    assert bar.is_disabled
    bar.teardown(trainer, SimpleNamespace(), "fit")  # type: ignore[arg-type]
    assert sys.breakpointhook is sys.__breakpointhook__


def test_the_settings_of_lightning_s_bar_are_taken() -> None:
    bar = ProgressBar(refresh_rate=0, leave=True, console_kwargs={"stderr": True})
    assert bar.is_disabled
    assert bar._leave
    assert bar._console_kwargs == {"soft_wrap": True, "stderr": True}
