"""Reads and mends the counters of Lightning's loops when a run goes on from a checkpoint.

The checkpoint is written between two steps, in ``on_train_batch_start``: a batch has been
announced and not begun. Lightning 2.6 counts that batch twice after a resume, and a step too few in
the logs; it holds a validation for done that has not run, and leaves ``ReduceLROnPlateau`` out at
the end of the resumed epoch. ``harness/tests/checkpoints/test_resume.py`` fails where a repair is
not needed any more.
"""

from copy import deepcopy
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import CombinedLoader

PRIVATE = {
    "trainer:fit_loop": "_restarting",
    "harness.upstream.resume_counters:example()": "_mode",
    "trainer:fit_loop.epoch_progress.current": "ready processed",
    "trainer:fit_loop.epoch_loop": "_batches_that_stepped restarting total_batch_idx",
    "trainer:fit_loop.epoch_loop.batch_progress": "is_last_batch",
    "trainer:fit_loop.epoch_loop.batch_progress.total": "ready started processed completed",
    "trainer:fit_loop.epoch_loop.batch_progress.current": "ready started processed completed",
    "trainer:fit_loop.epoch_loop.val_loop.batch_progress": "state_dict load_state_dict",
}


def example() -> CombinedLoader:
    """A collection of loaders whose attributes are looked up."""
    return CombinedLoader([])


def cycles(loaders: CombinedLoader) -> bool:
    """Whether a shorter loader begins again within an epoch, beside a longer one."""
    return loaders._mode == "max_size_cycle"


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
        progress.is_last_batch = False  # the saved value is that of the announced batch
        # The loop adds one, as if the step had not been counted when the checkpoint was written.
        loop._batches_that_stepped -= 1


def validation_counters(trainer: pl.Trainer) -> dict[str, Any]:
    """Where validation stands, to be kept with a checkpoint."""
    return deepcopy(trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict())


def repair_validation(trainer: pl.Trainer, counters: dict[str, Any]) -> None:
    """Undo that a validation was counted which has not run; call it in ``on_train_batch_start``."""
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.load_state_dict(counters)


def end_restart(trainer: pl.Trainer) -> None:
    """Treat the epoch as any other; call it in ``on_train_batch_end``.

    Otherwise ``ReduceLROnPlateau`` is not asked at the end of the epoch in which a run was resumed.
    The public ``restarting`` cannot be set to ``False`` where ``max_steps`` is given.
    """
    trainer.fit_loop._restarting = False


def position_in(checkpoint: dict[str, Any], batches_per_step: int) -> tuple[int, int]:
    """The epoch at which a checkpoint was written, and how many of its steps were done.

    Args:
        checkpoint: written between two steps.
        batches_per_step: ``trainer.accumulate_grad_batches`` of the run that wrote it.
    """
    loop = checkpoint["loops"]["fit_loop"]
    epochs = loop["epoch_progress"]["current"]
    batches = loop["epoch_loop.batch_progress"]["current"]
    is_inside = epochs["ready"] > epochs["processed"]
    step = batches["processed"] // batches_per_step if is_inside else 0
    return epochs["processed"], step


def validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether a validation comes after the step that begins here, unless time decides it."""
    every_epochs = trainer.check_val_every_n_epoch
    is_epoch_with = every_epochs is None or (trainer.current_epoch + 1) % every_epochs == 0
    if not (trainer.enable_validation and is_epoch_with):
        return False
    every, num_batches = trainer.val_check_batch, trainer.num_training_batches
    batches = min(trainer.accumulate_grad_batches, int(min(num_batches, 2**62)) - batch_idx)
    if every is None or every == float("inf"):
        return batch_idx + batches >= num_batches
    first = trainer.fit_loop.epoch_loop.total_batch_idx if every_epochs is None else batch_idx
    return any((first + i) % every == 0 for i in range(1, batches + 1))


def num_steps_logged(trainer: pl.Trainer) -> int:
    """The step that loggers get for what is logged now; one less for an epoch's last values."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
