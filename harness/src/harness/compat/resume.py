"""Fix what Lightning 2.6 restores wrongly when a run resumes from a checkpoint.

The checkpoint is written between two steps, in ``on_train_batch_start``: Lightning has counted the
next batch as ready, but not computed it. In: the checkpoint and the Trainer that loads it
(``checkpoints.safe_point`` calls). ``harness/tests/checkpoints/test_resume.py`` fails if a fix is
not needed any more.
"""

import logging
import os
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader

from harness.compat.logged_values import in_hook
from harness.files import is_inside

log = logging.getLogger(__name__)
PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")  # of ModelCheckpoint
FORGOTTEN = (
    "The ModelCheckpoint of %s forgets its earlier files: a resumed run keeps only those "
    "inside its own folder.\nSet its dirpath to ${run_dir}/checkpoints, or a folder below."
)


def restarts_shorter_loaders(loaders: CombinedLoader) -> bool:
    """Return whether a shorter loader starts again within an epoch, until the longest one ends."""
    return loaders._mode == "max_size_cycle"


def position_in(checkpoint: dict[str, Any], batches_per_step: int) -> tuple[int, int]:
    """Return the epoch of a checkpoint, and the number of completed steps in it.

    ``batches_per_step`` is ``trainer.accumulate_grad_batches`` of the run that wrote it.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epochs = loop["epoch_progress"]["current"]
    batches = loop["epoch_loop.batch_progress"]["current"]
    is_in_epoch = epochs["ready"] > epochs["processed"]
    return epochs["processed"], batches["processed"] // batches_per_step if is_in_epoch else 0


def make_loaders(trainer: pl.Trainer, made_at: dict[str, int]) -> None:
    """Make the loaders in ``on_load_checkpoint``, each at the epoch in which the run made it.

    ``reload_dataloaders_every_n_epochs`` counts from the epoch in which the loaders were made, and
    Lightning restores the epoch only later. So this function sets the epoch meanwhile.
    """
    fit: Any = trainer.fit_loop
    for split, loop in {"train": fit, "val": fit.epoch_loop.val_loop}.items():
        if split in made_at:
            fit.epoch_progress.current.completed = made_at[split]
            loop.setup_data()
    fit.epoch_progress.current.completed = 0


def repair_counters(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Reset the counters of the batch that was ready; call it in ``on_load_checkpoint``.

    Args:
        checkpoint: changed in place.
        before: batches per step in the run that wrote the checkpoint.
        now: batches per step in this run, whose number of devices may differ.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counter in (progress["total"], progress["current"]):
        assert counter["processed"] % before == 0, "written inside of a step"
        num_batches = counter["processed"] // before * now
        counter |= dict.fromkeys(("ready", "started", "processed", "completed"), num_batches)
    progress["is_last_batch"] = False


def hold_validation(trainer: pl.Trainer) -> Any:
    """Switch validation off until ``end_restart``, which gets the returned value.

    If a validation came just before the checkpoint, Lightning would count that step twice. It would
    also advance a ``ReduceLROnPlateau`` schedule twice.
    """
    limit, trainer.limit_val_batches = trainer.limit_val_batches, 0
    return limit


def end_restart(trainer: pl.Trainer, limit_val_batches: Any) -> None:
    """End Lightning's restart mode; call it in the first ``on_train_batch_start``.

    Otherwise Lightning does not step ``ReduceLROnPlateau`` at the end of the resumed epoch.
    """
    trainer.limit_val_batches = limit_val_batches
    trainer.fit_loop.on_iteration_done()


def validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether a validation follows the step that starts with this batch.

    A ``val_check_interval`` that is a time is ignored.
    """
    every_epochs = trainer.check_val_every_n_epoch
    is_due_in_epoch = every_epochs is None or (trainer.current_epoch + 1) % every_epochs == 0
    if not (trainer.enable_validation and is_due_in_epoch):
        return False
    every, num_batches = trainer.val_check_batch, trainer.num_training_batches
    batches = min(trainer.accumulate_grad_batches, int(min(num_batches, 2**62)) - batch_idx)
    if every is None or every == float("inf"):
        return batch_idx + batches >= num_batches
    first = trainer.fit_loop.total_batch_idx if every_epochs is None else batch_idx
    return any((first + i) % every == 0 for i in range(1, batches + 1))


def begin_epoch(trainer: pl.Trainer, callbacks: list[pl.Callback]) -> None:
    """Call ``on_train_epoch_start`` of callbacks and module if a run resumes within an epoch.

    Lightning skips this hook in such an epoch, so the attributes that it sets on data sets or
    progress bars would be missing. Weights, buffers and optimizer settings keep their values from
    the checkpoint.
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
    for group, restored in zip(groups, settings, strict=True):
        group.update(restored)


def repair_model_checkpoints(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Restore the last value of each ``ModelCheckpoint``, and update its paths to the run's folder.

    Lightning saves the last value of the monitored metric, but does not load it. If the run's
    folder was moved, Lightning forgets the other values. If the folder was copied, Lightning
    deletes files of the original, at any path that the checkpoint names.
    """
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, ModelCheckpoint) and state is not None:
            callback.current_score = state["current_score"]
            move = partial(_moved, str(state["dirpath"]), str(callback.dirpath), trainer)
            best = {move(path): value for path, value in state["best_k_models"].items()}
            if best.pop("", None) is not None and trainer.is_global_zero:
                log.warning(FORGOTTEN, callback.dirpath)
            paths = {name: move(state[name]) for name in PATHS}
            now = {"dirpath": callback.dirpath, "best_k_models": best}
            states[callback.state_key] = state | paths | now


def _moved(before: str, now: str, trainer: pl.Trainer, path: str) -> str:
    """Return the new path of a file in a moved folder; "" if it is not in the run's folder."""
    relative = os.path.relpath(path or os.pardir, before)
    is_below = os.pardir not in relative.split(os.sep) and is_inside(now, trainer.default_root_dir)
    return os.path.join(now, relative) if is_below else ""


def forget_length(schedule: dict[str, Any]) -> None:
    """Remove the length from a ``OneCycleLR`` state, so that the schedule keeps its own length."""
    schedule.pop("total_steps", None)
    schedule.pop("_schedule_phases", None)
