"""Mends what Lightning 2.6 restores wrongly when a run goes on from a checkpoint.

The checkpoint is written between two steps, in ``on_train_batch_start``: a batch has been announced
and not begun. In: the checkpoint and the Trainer that loads it (``checkpoints.safe_point`` calls).
``harness/tests/checkpoints/test_resume.py`` fails where a repair is not needed any more.
"""

import logging
import os
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader

from harness.files import is_inside
from harness.upstream.logged_values import in_hook

log = logging.getLogger(__name__)
PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")  # of ModelCheckpoint
FORGOTTEN = (
    "The ModelCheckpoint of %s forgets its earlier files: a resumed run knows those alone that are "
    "inside of its own folder.\nSet its dirpath to ${run_dir}/checkpoints, or a folder below."
)


def cycles(loaders: CombinedLoader) -> bool:
    """Return whether a shorter loader begins again within an epoch, beside a longer one."""
    return loaders._mode == "max_size_cycle"


def position_in(checkpoint: dict[str, Any], batches_per_step: int) -> tuple[int, int]:
    """Return the epoch of a checkpoint, and how many of its steps were done.

    `batches_per_step` is ``trainer.accumulate_grad_batches`` of the run that wrote it.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epochs = loop["epoch_progress"]["current"]
    batches = loop["epoch_loop.batch_progress"]["current"]
    is_inside = epochs["ready"] > epochs["processed"]
    return epochs["processed"], batches["processed"] // batches_per_step if is_inside else 0


def make_loaders(trainer: pl.Trainer, made_at: dict[str, int]) -> None:
    """Make loaders in ``on_load_checkpoint`` as they were made, at an epoch of each split.

    Lightning restores its epoch later, and counts from here when it is to make them again.
    """
    fit: Any = trainer.fit_loop
    for split, loop in {"train": fit, "val": fit.epoch_loop.val_loop}.items():
        if split in made_at:
            fit.epoch_progress.current.completed = made_at[split]
            loop.setup_data()
    fit.epoch_progress.current.completed = 0


def repair_counters(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Let a checkpoint say that the announced batch was not; call it in ``on_load_checkpoint``.

    Counters count batches, of which a step had `before`; other devices may need another number.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counter in (progress["total"], progress["current"]):
        assert counter["processed"] % before == 0, "written inside of a step"
        num_batches = counter["processed"] // before * now
        counter |= dict.fromkeys(("ready", "started", "processed", "completed"), num_batches)
    progress["is_last_batch"] = False


def hold_validation(trainer: pl.Trainer) -> Any:
    """Let no validation be due until ``end_restart``, which gets what this returns.

    If one came before the checkpoint, Lightning would count a step for it again, and ask a
    ``ReduceLROnPlateau`` of steps again.
    """
    limit, trainer.limit_val_batches = trainer.limit_val_batches, 0
    return limit


def end_restart(trainer: pl.Trainer, limit_val_batches: Any) -> None:
    """Treat the epoch as any other; call it in the first ``on_train_batch_start``.

    Otherwise Lightning does not ask ``ReduceLROnPlateau`` at the end of the resumed epoch.
    """
    trainer.limit_val_batches = limit_val_batches
    trainer.fit_loop.on_iteration_done()


def validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether a validation comes after the step that begins here, unless time decides it."""
    every_epochs = trainer.check_val_every_n_epoch
    is_epoch_with = every_epochs is None or (trainer.current_epoch + 1) % every_epochs == 0
    if not (trainer.enable_validation and is_epoch_with):
        return False
    every, num_batches = trainer.val_check_batch, trainer.num_training_batches
    batches = min(trainer.accumulate_grad_batches, int(min(num_batches, 2**62)) - batch_idx)
    if every is None or every == float("inf"):
        return batch_idx + batches >= num_batches
    first = trainer.fit_loop.total_batch_idx if every_epochs is None else batch_idx
    return any((first + i) % every == 0 for i in range(1, batches + 1))


def begin_epoch(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Call ``on_train_epoch_start`` of the module and of callbacks where a run goes on inside one.

    Lightning leaves it out there, and data sets, iterators or progress bars would lack what it has
    set. Weights, buffers and the optimizers' settings are in the checkpoint, and stay.
    """
    module, hook = trainer.lightning_module, "on_train_epoch_start"
    tensors = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    with in_hook(module, hook):
        for callback in callbacks:
            getattr(callback, hook)(trainer, module)
        getattr(module, hook)()
    with torch.no_grad():
        for tensor, value in tensors:
            tensor.copy_(value)
    for group, before in zip(groups, settings, strict=True):
        group.update(before)


def repair_model_checkpoints(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Let each ``ModelCheckpoint`` know its last score, and find its files in the run's folder now.

    Lightning saves the score and does not load it. Where the folder was moved it forgets the other
    scores, and where it was copied it deletes files of the original: of any path that the
    checkpoint names.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and state is not None:
            callback.current_score = state["current_score"]
            move = partial(_moved, str(state["dirpath"]), str(callback.dirpath), trainer)
            best = {move(path): score for path, score in state["best_k_models"].items()}
            if best.pop("", None) is not None and trainer.is_global_zero:
                log.warning(FORGOTTEN, callback.dirpath)
            paths = {name: move(state[name]) for name in PATHS}
            now = {"dirpath": callback.dirpath, "best_k_models": best}
            states[callback.state_key] = state | paths | now


def _moved(before: str, now: str, trainer: pl.Trainer, path: str) -> str:
    """Return where a file of a folder is now; "" unless that is inside of the run's folder."""
    below = os.path.relpath(path or os.pardir, before)
    is_below = os.pardir not in below.split(os.sep) and is_inside(now, trainer.default_root_dir)
    return os.path.join(now, below) if is_below else ""


def forget_length(schedule: dict[str, Any]) -> None:
    """Take the length out of a ``OneCycleLR`` state, so that the one in the run keeps its own."""
    schedule.pop("total_steps", None)
    schedule.pop("_schedule_phases", None)
