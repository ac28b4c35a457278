"""Mends states that Lightning saves in a checkpoint and loads wrongly.

Without this a resumed run in double precision starts from rounded weights, ``ModelCheckpoint``
forgets its last score and, where the run's folder has moved, its best ones, a longer run keeps the
shorter schedule of ``OneCycleLR``, a module and its author's callbacks do not hear of the epoch
that goes on, and buffers that are not persistent begin anew. Seen in Lightning 2.6;
``harness/tests/checkpoints/test_resume.py`` fails where a repair is not needed.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import DoublePrecision
from pytorch_lightning.trainer import call
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torchmetrics import Metric

PRIVATE = {
    "torch:Tensor()": "_version",
    "harness.upstream.resume_states:example()": "_schedule_phases",
    "pytorch_lightning.trainer.call": "_call_lightning_module_hook",
}


def repair_precision(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Make a module double before its weights are loaded; call it in ``setup``.

    Lightning loads first, into single precision, and rounds every weight.
    """
    if isinstance(trainer.precision_plugin, DoublePrecision):
        pl_module.double()


def after_start_hooks(trainer: pl.Trainer, function: Callable[[], None]) -> None:
    """Call a function after all ``on_train_start``, before an epoch begins or a batch is read."""
    strategy: Any = trainer.strategy
    original = strategy.on_train_start

    def on_train_start() -> None:
        strategy.on_train_start = original
        original()
        function()

    strategy.on_train_start = on_train_start


def begin_epoch(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Call ``on_train_epoch_start`` of the module and of callbacks where a run goes on inside one.

    Lightning leaves it out there, and what it has set would be missing where no checkpoint holds
    it: in data sets, iterators, progress bars. What is in the checkpoint stays: weights, buffers,
    and the optimizers' settings.
    """
    module = trainer.lightning_module
    hook = "on_train_epoch_start"
    tensors = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    for callback in callbacks:
        getattr(callback, hook)(trainer, module)
    if is_overridden(hook, module):
        call._call_lightning_module_hook(trainer, hook)
    with torch.no_grad():
        for tensor, value in tensors:
            tensor.copy_(value)
    for group, before in zip(groups, settings, strict=True):
        group.update(before)


def unsaved_buffers(module: nn.Module) -> Iterator[str]:
    """The names of buffers that no checkpoint holds: those that are not persistent."""
    saved = nn.Module.state_dict(module)  # not an author's own, which may leave weights out
    for path, part in module.named_modules():
        names = [name for name, _ in part.named_buffers(path, recurse=False)]
        yield from (name for name in names if name not in saved and not isinstance(part, Metric))


def num_changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return -1 if tensor.is_inference() else tensor._version


def repair_current_scores(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Load the one value of ``ModelCheckpoint`` that it saves and does not load."""
    for callback in _saved(trainer, states):
        callback.current_score = states[callback.state_key]["current_score"]


def repair_paths(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Let ``ModelCheckpoint`` find its files where the run's folder is now.

    Otherwise it forgets its scores where the folder has been moved, and changes files of the
    original where it has been copied.
    """
    for callback in _saved(trainer, states):
        state = states[callback.state_key]
        states[callback.state_key] = moved(state, str(state["dirpath"]), str(callback.dirpath))


def _saved(trainer: pl.Trainer, states: dict[str, Any]) -> list[ModelCheckpoint]:
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return [callback for callback in callbacks if callback.state_key in states]


def moved(value: Any, before: str, now: str) -> Any:
    """A tree of values in which paths below the folder ``before`` are below ``now``."""
    if isinstance(value, dict):
        return {moved(k, before, now): moved(v, before, now) for k, v in value.items()}
    if isinstance(value, str) and (value == before or value.startswith(before + os.sep)):
        return now + value[len(before) :]
    return value


def forget_length(schedule: dict[str, Any]) -> None:
    """Take the length out of a ``OneCycleLR`` state, so that the one in the run keeps its own."""
    schedule.pop("total_steps", None)
    schedule.pop("_schedule_phases", None)


def example() -> OneCycleLR:
    """A schedule whose attributes are looked up."""
    return OneCycleLR(torch.optim.SGD([torch.zeros(1)]), max_lr=1.0, total_steps=2)
