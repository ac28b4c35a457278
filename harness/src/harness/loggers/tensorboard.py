"""Write TensorBoard's events in the background, and let a run continue if a logger fails.

In: the loggers that the config names. Out: the same loggers, guarded. Next: the Trainer calls them.
"""

import logging
from functools import partial
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only

log = logging.getLogger(__name__)

CALLS = ["log_hyperparams", "log_metrics", "log_graph", "save", "after_save_checkpoint", "finalize"]
WRITE_ALL = "write_all"  # only this library's loggers, which write files, have this method


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, which writes events to the disk in the background, every ``flush_secs``.

    Lightning's own ``save`` waits for the disk after each row. This takes longer than a small
    network's step.
    """

    def save(self) -> None:
        """Do nothing: events are written in the background, and config.yaml holds the settings."""

    @rank_zero_only
    def write_all(self) -> None:
        """Wait until all events are in the file."""
        self.experiment.flush()


def guarded(logger: Logger) -> Logger:
    """Return the same logger, whose methods log an error once instead of raising it."""
    failed: set[str] = set()  # names of methods that have failed
    for name in [*CALLS, WRITE_ALL]:
        if hasattr(logger, name):
            setattr(logger, name, partial(_call, logger, name, failed))
    return logger


def _call(logger: Logger, name: str, failed: set[str], *args: Any, **kwargs: Any) -> Any:
    """Call a method of the logger's class; log its first error, and return.

    A logger of files is called again, because the disk may have space later. A tracker is not
    called again, because each call may wait for minutes.
    """
    is_tracker = not hasattr(logger, WRITE_ALL)
    if is_tracker and failed:
        return
    try:
        return getattr(type(logger), name)(logger, *args, **kwargs)
    except Exception as error:
        if name not in failed:
            # TensorBoard's message for a full disk is that a number is not supported.
            reason = error.__cause__ if isinstance(error.__cause__, OSError) else error
            method, without = f"{type(logger).__name__}.{name}", " without it" if is_tracker else ""
            log.warning("%s failed, and the run continues%s: %s", method, without, reason)
            log.info("The traceback:", exc_info=error)
        failed.add(name)
