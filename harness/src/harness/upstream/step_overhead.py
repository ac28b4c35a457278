"""Spares a step the work that Lightning does for nobody; a run is the same without this file.

For each of some eight hooks of a step Lightning 2.6 enters a profiler's context for every callback,
though most hooks are empty and nobody profiles: 0.25 ms of a step of 0.8 ms. And before each step
of several processes it broadcasts whether the first one got a SIGTERM, and waits for the answer.
Left out with versions that were not tested; ``harness/tests/upstream/test_step_overhead.py``
compares the calls.
"""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.trainer import call

from harness.upstream import versions

PRIVATE = {
    "pytorch_lightning.trainer.call": "_call_callback_hooks",
    "pytorch_lightning:LightningModule()": "_current_fx_name",
    "trainer:fit_loop.epoch_loop": "_broadcast_sigterm_tensor",
}
MONITORING = (EarlyStopping, Checkpoint)

original = call._call_callback_hooks


def skip_empty_hooks(trainer: pl.Trainer) -> None:
    """Let the next run skip them, unless its Trainer has a profiler, which wants to see each."""
    is_profiled = type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]
    is_left_out = is_profiled or versions.untested()
    call._call_callback_hooks = original if is_left_out else call_callbacks


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
    """Call the hook of those callbacks that override it, in Lightning's order."""
    pl_module = trainer.lightning_module
    # Past nn.Module's __setattr__, which asks whether the name is a parameter.
    state = {} if pl_module is None else pl_module.__dict__
    before, state["_current_fx_name"] = state.get("_current_fx_name"), hook_name
    empty = getattr(pl.Callback, hook_name)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
        if getattr(type(callback), hook_name) is empty and hook_name not in vars(callback):
            continue
        if monitoring_callbacks not in (None, isinstance(callback, MONITORING)):
            continue
        hook = getattr(callback, hook_name)
        if callable(hook):
            hook(trainer, pl_module, *args, **kwargs)
    state["_current_fx_name"] = before
