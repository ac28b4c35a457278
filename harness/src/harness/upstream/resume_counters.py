"""Reads and mends the counters of Lightning's loops when a run goes on from a checkpoint.

The checkpoint is written between two steps, in ``on_train_batch_start``: a batch has been
announced and not begun. Lightning 2.6 would take it for one that was trained, and leaves
``ReduceLROnPlateau`` out at the end of the resumed epoch. So the counters are edited in the
checkpoint, before Lightning loads them. ``harness/tests/checkpoints/test_resume.py`` fails where a
repair is not needed any more.
"""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import CombinedLoader

PRIVATE = {
    "harness.upstream.resume_counters:example()": "_mode",
    "trainer:fit_loop.epoch_loop": "_batches_that_stepped on_load_checkpoint",
}


def example() -> CombinedLoader:
    """A collection of loaders whose attributes are looked up."""
    return CombinedLoader([])


def cycles(loaders: CombinedLoader) -> bool:
    """Whether a shorter loader begins again within an epoch, beside a longer one."""
    return loaders._mode == "max_size_cycle"


def repair_counters(checkpoint: dict[str, Any], before: int, now: int) -> None:
    """Let a checkpoint say that the announced batch was not; call it in ``on_load_checkpoint``.

    Args:
        checkpoint: written between two steps.
        before: ``trainer.accumulate_grad_batches`` of the run that wrote it. Counters count
            batches, and other devices may need another number of them per step.
        now: that of this run.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counter in (progress["total"], progress["current"]):
        assert counter["processed"] % before == 0, "written inside of a step"
        num_batches = counter["processed"] // before * now
        counter |= dict.fromkeys(("ready", "started", "processed", "completed"), num_batches)
    progress["is_last_batch"] = False


def hold_plateaus(trainer: pl.Trainer) -> list[Any]:
    """Let no ``ReduceLROnPlateau`` of steps be asked until ``end_restart``.

    Where a validation came before the checkpoint, Lightning asks it once more before the first
    batch.
    """
    of_steps = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
    held = [config for config in of_steps if config.interval == "step"]
    for config in held:
        config.interval = "none"
    return held


def end_restart(trainer: pl.Trainer, held: list[Any], checkpoint_loop: dict[str, Any]) -> None:
    """Treat the epoch as any other; call it in the first ``on_train_batch_start``.

    Otherwise ``ReduceLROnPlateau`` is not asked at the end of the epoch in which a run was resumed,
    and a step that comes after a validation is logged one too high.
    """
    for config in held:
        config.interval = "step"
    trainer.fit_loop.epoch_loop.on_load_checkpoint(checkpoint_loop)
    trainer.fit_loop.on_iteration_done()


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
    first = trainer.fit_loop.total_batch_idx if every_epochs is None else batch_idx
    return any((first + i) % every == 0 for i in range(1, batches + 1))


def num_steps_logged(trainer: pl.Trainer) -> int:
    """The step that loggers get for what is logged now; one less for an epoch's last values."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
