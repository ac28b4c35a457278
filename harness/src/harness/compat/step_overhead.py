"""Skip work of Lightning 2.6 in each step that has no effect.

- For each of six hooks, it enters a profiler context for every callback and calls the hook, even
  if the hook is empty. A project's callbacks stay as they are.
- It sets the name of the running hook about fifty times, as an attribute of the module. For each,
  ``nn.Module.__setattr__`` asks whether the name is a parameter, a buffer or a layer.

Together this takes a seventh of a step of the tiny network in ``harness/benchmarks/overhead.py``.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.profilers import PassThroughProfiler

from harness.compat import callbacks_of

NOTHING: AbstractContextManager[Any] = nullcontext()
HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
HOOK_NAME = "_current_fx_name"
set_any = pl.LightningModule.__setattr__


def set_attribute(module: pl.LightningModule, name: str, value: Any) -> None:
    """Set an attribute of a module; the name of the running hook without a check."""
    if name == HOOK_NAME:
        module.__dict__[name] = value
    else:
        set_any(module, name, value)


class NoProfiler(PassThroughProfiler):
    """Return the same empty context for every action."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return a context that does nothing."""
        return NOTHING


def skip_unimplemented_hooks(trainer: pl.Trainer) -> None:
    """Skip step hooks that a callback of the library or Lightning does not implement.

    It also replaces Lightning's default profiler, which measures nothing, and the method of modules
    that sets the name of the running hook.
    """
    pl.LightningModule.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]  # set untyped
        trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
    for callback in callbacks_of(trainer):
        is_known = type(callback).__module__.partition(".")[0] in ("harness", "pytorch_lightning")
        for name in HOOKS if is_known else ():
            if getattr(type(callback), name) is getattr(pl.Callback, name):
                # Lightning skips None. A LambdaCallback keeps the functions that it has set here.
                vars(callback).setdefault(name, None)
