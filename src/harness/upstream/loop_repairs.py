"""What Lightning 2.6 gets wrong when it goes on from a checkpoint written between two steps.

Such a checkpoint is written in ``on_train_batch_start``, where a batch has been announced and not
begun. All names with an underscore are private to Lightning;
``tests_harness/checkpoints/test_resume.py`` fails where they change their meaning.
"""

import os
from copy import deepcopy
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import DoublePrecision


def repair_counters(trainer: pl.Trainer, batches_per_step_before: int) -> None:
    """Make the counters what they were; call it in ``on_train_start``.

    Args:
        trainer: has just loaded a checkpoint.
        batches_per_step_before: ``trainer.accumulate_grad_batches`` of the run that wrote it.
            Counters count batches, and other devices may need another number of them per step.
    """
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    counters: Any = (progress.total, progress.current)
    for counter in counters:
        assert counter.processed % batches_per_step_before == 0, "written inside of a step"
        num_batches = counter.processed // batches_per_step_before * trainer.accumulate_grad_batches
        # The announced batch was counted as ready, and would be counted again.
        counter.ready = counter.started = counter.processed = counter.completed = num_batches
    if loop.restarting:
        progress.is_last_batch = False  # told of the announced batch
        # The loop adds one, as if the step had not been counted when the checkpoint was written.
        loop._batches_that_stepped -= 1


def repair_precision(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Make a module double before its weights are loaded; call it in ``setup``.

    Lightning loads first, into single precision, and rounds every weight.
    """
    if isinstance(trainer.precision_plugin, DoublePrecision):
        pl_module.double()


def validation_counters(trainer: pl.Trainer) -> dict[str, Any]:
    """Where validation stands, to be kept with a checkpoint."""
    return deepcopy(trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict())


def repair_validation(trainer: pl.Trainer, counters: dict[str, Any]) -> None:
    """Undo that a validation was counted which has not run; call it in ``on_train_batch_start``."""
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.load_state_dict(counters)


def validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether a validation comes after the step that begins here, but for one by the clock."""
    loop = trainer.fit_loop.epoch_loop
    if not loop._should_check_val_epoch():
        return False
    every, num_batches = trainer.val_check_batch, trainer.num_training_batches
    batches = min(trainer.accumulate_grad_batches, int(min(num_batches, 2**62)) - batch_idx)
    if every is None or every == float("inf"):
        return batch_idx + batches >= num_batches
    counts_epochs = trainer.check_val_every_n_epoch is not None
    first = batch_idx if counts_epochs else loop.total_batch_idx
    return any((first + i) % every == 0 for i in range(1, batches + 1))


def repair_current_scores(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Load the one value of ``ModelCheckpoint`` that it saves and does not load."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
            callback.current_score = states[callback.state_key]["current_score"]


def repair_paths(trainer: pl.Trainer, states: dict[str, Any]) -> None:
    """Let ``ModelCheckpoint`` find its files where the run's folder is now.

    Else it forgets its scores where the folder has been moved, and changes files of the original
    where it has been copied.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
            before, now = states[callback.state_key]["dirpath"], callback.dirpath
            states[callback.state_key] = moved(states[callback.state_key], str(before), str(now))


def moved(value: Any, before: str, now: str) -> Any:
    """A tree of values whose paths in one folder are in another one."""
    if isinstance(value, dict):
        return {moved(k, before, now): moved(v, before, now) for k, v in value.items()}
    if isinstance(value, str) and (value == before or value.startswith(before + os.sep)):
        return now + value[len(before) :]
    return value


def end_restart(trainer: pl.Trainer) -> None:
    """Treat the epoch as any other; call it in ``on_train_batch_end``.

    Else ``ReduceLROnPlateau`` is not asked at the end of the epoch in which a run was resumed.
    """
    trainer.fit_loop._restarting = False
