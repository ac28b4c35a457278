"""Skip work of Lightning 2.6 in each step that has no effect.

- For each of six hooks, it enters a profiler context for every callback and calls the hook, even
  if the hook is empty. A project's callbacks stay as they are.
- It sets the name of the running hook about fifty times, as an attribute of the module. For each,
  ``nn.Module.__setattr__`` asks whether the name is a parameter, a buffer or a layer.
- It inspects the signature of ``training_step`` in each step, and in each call of ``self.log``.

Together this takes a fifth of a step of the tiny network in ``harness/benchmarks/overhead.py``.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.core import module as core_module
from pytorch_lightning.loops import evaluation_loop, training_epoch_loop
from pytorch_lightning.loops import utilities as loop_utilities
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.utilities import signature_utils

from harness.compat import callbacks_of

NOTHING: AbstractContextManager[Any] = nullcontext()
HOOKS = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
HOOK_NAME = "_current_fx_name"
set_any = pl.LightningModule.__setattr__
inspect_once = lru_cache(16)(signature_utils.is_param_in_hook_signature)


def set_attribute(module: pl.LightningModule, name: str, value: Any) -> None:
    """Set an attribute of a module; the name of the running hook without a check."""
    if name == HOOK_NAME:
        module.__dict__[name] = value
    else:
        set_any(module, name, value)


def has_parameter(hook: Any, *args: Any, **kwargs: Any) -> bool:
    """Return what ``is_param_in_hook_signature`` returns; inspect each method of a class once."""
    if isinstance(hook, MethodType):
        return inspect_once(hook.__func__, *args, **kwargs)
    return signature_utils.is_param_in_hook_signature(hook, *args, **kwargs)


class NoProfiler(PassThroughProfiler):
    """Return the same empty context for every action."""

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return a context that does nothing."""
        return NOTHING


def skip_needless_work(trainer: pl.Trainer) -> None:
    """Skip the work that the first lines of this file list.

    The Trainer gets a profiler that does nothing, unless the user has chosen one. Its callbacks
    from the library and from Lightning lose the step hooks that they do not implement. The other
    changes replace functions of Lightning for the whole process.
    """
    pl.LightningModule.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    for part in (core_module, evaluation_loop, loop_utilities, training_epoch_loop):
        part.is_param_in_hook_signature = has_parameter  # type: ignore[attr-defined]
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]  # set untyped
        trainer.profiler = NoProfiler()  # type: ignore[attr-defined]
    for callback in callbacks_of(trainer):
        is_known = type(callback).__module__.partition(".")[0] in ("harness", "pytorch_lightning")
        for name in HOOKS if is_known else ():
            if getattr(type(callback), name) is getattr(pl.Callback, name):
                # Lightning skips None. A LambdaCallback keeps the functions that it has set here.
                vars(callback).setdefault(name, None)
