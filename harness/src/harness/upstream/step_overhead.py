"""Spares a step the work that Lightning does for nobody; a run is the same without this file.

For each batch Lightning looks up some 20 hooks in every callback and enters a profiler's context
for each, though most are empty and nobody profiles, and it notes the name of each hook in the
module, where torch checks whether it is a parameter: 0.25 ms a step with the callbacks of this
project. Here the same calls are made in the same order, and that is all. Before each step it also
broadcasts whether the first process got a SIGTERM, and waits for the device to read the answer.
It also inspects the signature of ``training_step``, compares its states some 25 times as texts in
lower case, and at each ``self.log`` walks through all that it keeps of the name to move it to where
it is.

Seen in Lightning 2.6, and left out with versions that were not tested.
``harness/tests/upstream/test_step_overhead.py`` compares the calls.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.enums import StrEnum
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.loops import training_epoch_loop
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.trainer import call
from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultMetric
from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerStatus
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from harness.upstream import versions

PRIVATE = {
    "pytorch_lightning.trainer.call": "_call_callback_hooks _call_lightning_module_hook "
    "_call_strategy_hook",
    "pytorch_lightning:LightningModule()": "_current_fx_name",
    "pytorch_lightning.trainer.connectors.logger_connector.result": "_ResultMetric",
    "torchmetrics:MeanMetric()": "_defaults",
    "pytorch_lightning.loops.training_epoch_loop": "is_param_in_hook_signature",
    "trainer:fit_loop.epoch_loop": "_broadcast_sigterm_tensor",
}
MONITORING = (EarlyStopping, Checkpoint)
STATES = (RunningStage, TrainerFn, TrainerStatus)

originals: dict[str, Any] = {}  # Lightning's functions, by their names


def skip_empty_hooks(trainer: pl.Trainer) -> None:
    """Let the next run skip them, unless its Trainer has a profiler, which wants to see each."""
    look_once()
    is_profiled = type(trainer.profiler) is not PassThroughProfiler  # type: ignore[attr-defined]
    for name, replacement in (
        ("_call_callback_hooks", call_callbacks),
        ("_call_lightning_module_hook", call_module),
        ("_call_strategy_hook", call_strategy),
    ):
        original = originals.setdefault(name, getattr(call, name))
        setattr(call, name, original if is_profiled or versions.untested() else replacement)


def look_once() -> None:
    """Inspect a signature once, compare states as members, and move logged values when needed."""
    if versions.untested():
        return
    training_epoch_loop.is_param_in_hook_signature = takes_parameter  # type: ignore[assignment,attr-defined]
    _ResultMetric.to = move  # type: ignore[assignment]
    for kind in STATES:
        kind.__eq__ = is_same_state  # type: ignore[method-assign]


def takes_parameter(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """What ``is_param_in_hook_signature`` says of a function."""
    return _takes_parameter(getattr(hook, "__func__", hook), *args, **kwargs)


_takes_parameter = lru_cache(64)(is_param_in_hook_signature)


_move = _ResultMetric.to


def move(logged: _ResultMetric, device: torch.device) -> _ResultMetric:
    """Move what is kept of a logged name, if it is elsewhere."""
    if not logged.is_tensor:  # but a metric, which looks after itself
        return logged
    kept = [*vars(logged).values(), *logged._defaults.values()]
    if all(v.device == device for v in kept if isinstance(v, (torch.Tensor, Metric))):
        return logged
    return _move(logged, device)


def is_same_state(state: StrEnum, other: object) -> bool:
    """Whether a state equals another one, or a text that means it."""
    if type(other) is type(state):
        return state is other
    return bool(StrEnum.__eq__(state, other))


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
    pl_module = trainer.lightning_module
    state = {} if pl_module is None else pl_module.__dict__
    before = state.get("_current_fx_name")
    state["_current_fx_name"] = hook_name
    empty = getattr(pl.Callback, hook_name)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set untyped
        if getattr(type(callback), hook_name) is empty and hook_name not in vars(callback):
            continue
        hook = getattr(callback, hook_name)
        if not callable(hook):
            continue
        if monitoring_callbacks is None or monitoring_callbacks == isinstance(callback, MONITORING):
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
