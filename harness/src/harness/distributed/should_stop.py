"""End the training of all ranks at the same step if one rank sets ``trainer.should_stop``.

In: ``trainer.should_stop``, which the user's code and callbacks set. Out: the same attribute, set
on all ranks at the end of the same optimizer step. Next: Lightning validates, and ends the
training.
"""

from typing import Any

import pytorch_lightning as pl

from harness.compat import callbacks_of
from harness.distributed.gather import gather


class SynchronizedStop:
    """Delay a stop that one rank requests until all ranks stop at the same step.

    If one rank stopped alone, the others would wait for it for ever. No step waits for a decision:
    a stop that is set in a training batch is part of the next vote, as a signal is. At the end of a
    validation or an epoch, when ``EarlyStopping`` may request a stop, the ranks gather at once.

    Args:
        group: the process group in which the ranks gather.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.is_wanted = False  # this rank requests the stop
        self.is_voted = False  # a vote has passed a rank's request to all ranks
        self.is_agreed = False  # all ranks stop at the end of this step

    def hold(self, trainer: pl.Trainer) -> None:
        """Set ``should_stop`` after a batch: ``True`` only if all ranks know and the step ends.

        Lightning alone would stop even between the accumulated batches of one step.
        """
        if not trainer.training or self.is_agreed:
            return
        self.is_wanted |= trainer.should_stop
        batch_idx = trainer.fit_loop.batch_idx
        is_step = (batch_idx + 1) % int(trainer.accumulate_grad_batches) == 0
        is_known = self.is_voted or (trainer.world_size == 1 and self.is_wanted)
        self.is_agreed = trainer.should_stop = is_known and (is_step or trainer.is_last_batch)

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Gather ``should_stop`` of all ranks at the end of a training epoch."""
        if trainer.training:
            self.combine(trainer)

    def combine(self, trainer: pl.Trainer) -> None:
        """Stop all ranks if one of them requests it. All ranks must call this."""
        if not self.is_agreed:
            requests = gather(trainer, self.is_wanted or trainer.should_stop, self.group)
            self.is_agreed = trainer.should_stop = any(requests)


def is_time_over(trainer: pl.Trainer) -> bool:
    """Return whether ``trainer.max_time`` is over, counting the run's earlier starts as well."""
    timers = [found for found in callbacks_of(trainer) if isinstance(found, pl.callbacks.Timer)]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)
