"""Spare a step the calls that Lightning makes for nothing.

For each of six hooks of a step Lightning 2.6 makes a profiler's context for every callback, and
calls it also where its class does not define the hook: a tenth of a step of the tiny network of
``harness/benchmarks/overhead.py``. Callbacks of a project stay as they are. Uses nothing private.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.profilers import PassThroughProfiler

from harness.upstream import callbacks_of

NOTHING: AbstractContextManager[Any] = nullcontext()
HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)


class NoProfiler(PassThroughProfiler):
    """Give the same empty context each time."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Measure nothing."""
        return NOTHING


def spare_empty_calls(trainer: pl.Trainer) -> None:
    """Let no callback of the harness be called for hooks of a step that it lacks.

    Nor is anything measured, unless the Trainer was given a profiler.
    """
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]  # set untyped
        trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
    for callback in callbacks_of(trainer):
        is_known = type(callback).__module__.partition(".")[0] in ("harness", "pytorch_lightning")
        for name in HOOKS if is_known else ():
            if getattr(type(callback), name) is getattr(pl.Callback, name):
                # Lightning skips what cannot be called. A LambdaCallback has its own in this place.
                vars(callback).setdefault(name, None)
