"""Makes means that are logged over several processes exact.

Lightning averages the number of samples over the processes as a whole number, so that
``self.log(..., sync_dist=True)`` of 33 samples on two processes is 3 % off; and a mean that is
logged without ``sync_dist`` is that of the first process alone. Nothing public leads to the sums.
Seen in Lightning 2.6; ``tests_harness/test_same_experiment.py`` compares the values.
"""

from typing import Any

import pytorch_lightning as pl

PRIVATE = {
    "trainer": "_results",
    "harness.upstream.logged_values:example()": "is_tensor has_reset cumulated_batch_size",
    "harness.upstream.logged_values:example().meta": "is_mean_reduction",
    "harness.upstream.logged_values:example().meta.sync": "should rank_zero_only",
}


def logged_means(trainer: pl.Trainer) -> list[Any]:
    """Lightning's accumulators of the plain values that the running loop has logged."""
    return [logged for logged in (trainer._results or {}).values() if logged.is_tensor]


def count_exactly(trainer: pl.Trainer) -> None:
    """Let the processes' numbers of samples be averaged as fractions."""
    if trainer.world_size > 1:
        for logged in logged_means(trainer):
            if logged.meta.is_mean_reduction:
                logged.cumulated_batch_size = logged.cumulated_batch_size.double()


def average_over_processes(trainer: pl.Trainer) -> list[Any]:
    """Treat means over an evaluation as if they were logged with ``sync_dist=True``.

    Lightning compares the declaration at every ``self.log``, so this lasts from the last batch to
    the end of the epoch.

    Returns:
        What was changed, for ``average_no_more``.
    """
    changed = []
    for logged in logged_means(trainer) if trainer.world_size > 1 else []:
        sync = logged.meta.sync
        if logged.meta.is_mean_reduction and not sync.should and not sync.rank_zero_only:
            sync.should = True
            changed.append(sync)
    return changed


def average_no_more(changed: list[Any]) -> None:
    """Leave the logged values as the module has declared them."""
    for sync in changed:
        sync.should = False


def start_anew(logged: Any) -> None:
    """Forget what an accumulator has counted, and keep it in the collective operations."""
    logged.reset()
    logged.has_reset = False  # otherwise Lightning leaves it out of them
