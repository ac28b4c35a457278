"""Spare a step the work that Lightning does for a profiler that nobody has asked for.

For each of some eight hooks of a step Lightning 2.6 makes a profiler's context for every callback:
a tenth of a step of the tiny network of ``harness/benchmarks/overhead.py``. Uses nothing private.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.profilers import PassThroughProfiler

NOTHING: AbstractContextManager[Any] = nullcontext()


class NoProfiler(PassThroughProfiler):
    """Give the same empty context each time."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Measure nothing."""
        return NOTHING


def profile_nothing(trainer: pl.Trainer) -> None:
    """Let the next run measure nothing, unless its Trainer was given a profiler."""
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]  # set untyped
        trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
