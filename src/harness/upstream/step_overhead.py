"""Spares a step the work that Lightning does for nobody; a run is the same without this file.

For each batch Lightning looks up some 20 hooks in every callback and enters a profiler's context
for each, though most are empty and nobody profiles, and it notes the name of each hook in the
module, where torch checks whether it is a parameter: 0.25 ms a step with the callbacks of this
project. Here the same calls are made in the same order, and that is all. Before each step it also
broadcasts whether the first process got a SIGTERM, and waits for the device to read the answer.

Seen in Lightning 2.6, and left out with versions that were not tested.
``tests_harness/upstream/test_step_overhead.py`` compares the calls.
"""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.trainer import call

from harness.upstream import versions

PRIVATE = {
    "pytorch_lightning.trainer.call": "_call_callback_hooks _call_lightning_module_hook "
    "_call_strategy_hook",
    "pytorch_lightning:LightningModule()": "_current_fx_name",
    "trainer:fit_loop.epoch_loop": "_broadcast_sigterm_tensor",
}

originals: dict[str, Any] = {}  # Lightning's functions, by their names


def skip_empty_hooks(trainer: pl.Trainer) -> None:
    """Let the next run skip them, unless its Trainer has a profiler, which wants to see each."""
    is_profiled = type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]
    for name, replacement in (
        ("_call_callback_hooks", call_callbacks),
        ("_call_lightning_module_hook", call_module),
        ("_call_strategy_hook", call_strategy),
    ):
        original = originals.setdefault(name, getattr(call, name))
        setattr(call, name, original if is_profiled or versions.untested() else replacement)


def skip_sigterm_broadcast(trainer: pl.Trainer) -> None:
    """Leave out the broadcast; the processes agree on signals in another way."""
    if not versions.untested():
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def call_callbacks(
    trainer: pl.Trainer,
    hook_name: str,
    *args: Any,
    monitoring_callbacks: bool | None = None,
    **kwargs: Any,
) -> None:
    """Call a hook of those callbacks that have one of their own."""
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
    return _call(pl_module, getattr(pl_module, hook_name), hook_name, args, kwargs)


def call_strategy(trainer: pl.Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the strategy."""
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
