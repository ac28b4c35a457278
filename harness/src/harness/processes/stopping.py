"""Let ``trainer.should_stop`` of one rank end the training of all ranks, at the same step.

In: ``trainer.should_stop``, which the user's code and callbacks set. Out: the same attribute, which
is ``True`` at the same step in all ranks, at the end of an optimizer step. Next: Lightning
validates, and ends the training.
"""

from typing import Any

import pytorch_lightning as pl

from harness.processes.agreement import gather
from harness.upstream import callbacks_of


class Stopping:
    """Hold a rank that wants to stop until all ranks know.

    A rank that left alone would let the others wait for ever. No step waits: a stop that is set in
    a training batch travels with the next vote, as a signal does. One that is set at the end of a
    validation or of an epoch, as ``EarlyStopping`` does, counts there, because ranks meet anyway.

    Args:
        group: of the ranks, for what they gather.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.is_wanted = False  # by this rank
        self.is_voted = False  # by a rank, and all ranks know
        self.is_agreed = False  # all ranks stop at the end of this step

    def hold(self, trainer: pl.Trainer) -> None:
        """Let no rank stop at the end of a batch unless all ranks have agreed, and the step ends.

        Lightning would stop between the batches that are accumulated for one step.
        """
        if not trainer.training or self.is_agreed:
            return
        self.is_wanted |= trainer.should_stop
        batch_idx = trainer.fit_loop.batch_idx
        is_step = (batch_idx + 1) % int(trainer.accumulate_grad_batches) == 0
        is_known = self.is_voted or (trainer.world_size == 1 and self.is_wanted)
        self.is_agreed = trainer.should_stop = is_known and (is_step or trainer.is_last_batch)

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Combine what hooks at the end of a training epoch have set."""
        if trainer.training:
            self.combine(trainer)

    def combine(self, trainer: pl.Trainer) -> None:
        """Stop all ranks if one of them wants to, where all of them call this."""
        if not self.is_agreed:
            wanted = gather(trainer, self.is_wanted or trainer.should_stop, self.group)
            self.is_agreed = trainer.should_stop = any(wanted)


def is_time_over(trainer: pl.Trainer) -> bool:
    """Return whether ``trainer.max_time`` is over, with what earlier starts of the run took."""
    timers = [one for one in callbacks_of(trainer) if isinstance(one, pl.callbacks.Timer)]
    return any((left := one.time_remaining()) is not None and left <= 0 for one in timers)
