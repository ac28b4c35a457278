"""Call the hooks that do something, and nothing around those that do not.

For each batch Lightning looks up some 20 hooks in every callback and enters a profiler's context
for each, though most are empty and nobody profiles, and it notes the name of each hook in the
module, where torch checks whether it is a parameter: 0.25 ms a step with the callbacks of this
project. Here the same calls are made in the same order, and that is all.

This replaces functions that are private to Lightning (seen in 2.6, where it is limited to);
``tests_harness/test_idle_hooks.py`` compares the calls, and fails where Lightning changes them.
"""

from functools import lru_cache
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.loops import evaluation_loop, training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities import signature_utils

of_callbacks = call._call_callback_hooks
of_module = call._call_lightning_module_hook
of_strategy = call._call_strategy_hook
takes_parameter = signature_utils.is_param_in_hook_signature


def skip_idle_hooks() -> None:
    """Let every Trainer of this process skip them, unless it has a profiler."""
    if not pl.__version__.startswith("2.6."):  # type: ignore[attr-defined]
        return
    call._call_callback_hooks = call_callbacks
    call._call_lightning_module_hook = call_module
    call._call_strategy_hook = call_strategy
    for loop in (training_epoch_loop, evaluation_loop):
        # Asked at every step of one and the same method.
        loop.is_param_in_hook_signature = lru_cache(maxsize=1)(takes_parameter)  # type: ignore[attr-defined]


def is_profiled(trainer: Any) -> bool:
    """Whether somebody wants to know how long each hook takes."""
    return type(trainer.profiler) is not PassThroughProfiler


def call_callbacks(
    trainer: pl.Trainer,
    hook_name: str,
    *args: Any,
    monitoring_callbacks: bool | None = None,
    **kwargs: Any,
) -> None:
    """Call a hook of those callbacks that have one of their own."""
    if is_profiled(trainer):
        of_callbacks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    empty = getattr(pl.Callback, hook_name)
    pl_module = trainer.lightning_module
    state = {} if pl_module is None else pl_module.__dict__
    before = state.get("_current_fx_name")
    state["_current_fx_name"] = hook_name
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
        hook = getattr(callback, hook_name)
        if getattr(hook, "__func__", None) is empty or not callable(hook):
            continue
        is_monitoring = isinstance(callback, (EarlyStopping, Checkpoint))
        if monitoring_callbacks is None or is_monitoring == monitoring_callbacks:
            hook(trainer, pl_module, *args, **kwargs)
    state["_current_fx_name"] = before


def call_module(
    trainer: pl.Trainer,
    hook_name: str,
    *args: Any,
    pl_module: pl.LightningModule | None = None,
    **kwargs: Any,
) -> Any:
    """Call a hook of the module."""
    pl_module = pl_module or trainer.lightning_module
    if is_profiled(trainer) or pl_module is None:
        return of_module(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    return _call(pl_module, getattr(pl_module, hook_name), hook_name, args, kwargs)


def call_strategy(trainer: pl.Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the strategy."""
    if is_profiled(trainer):
        return of_strategy(trainer, hook_name, *args, **kwargs)
    hook = getattr(trainer.strategy, hook_name)
    return _call(trainer.lightning_module, hook, hook_name, args, kwargs)


def _call(
    pl_module: pl.LightningModule, hook: Any, name: str, args: Any, kwargs: dict[str, Any]
) -> Any:
    if not callable(hook):
        return None
    state = pl_module.__dict__  # torch's own way in asks whether the name is a parameter
    before = state.get("_current_fx_name")
    state["_current_fx_name"] = name
    output = hook(*args, **kwargs)
    state["_current_fx_name"] = before
    return output
