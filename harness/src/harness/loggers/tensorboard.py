"""Write TensorBoard's events without waiting, and let no logger that fails cost a run its result.

In: the loggers that the config names. Out: the same, guarded. Next: the Trainer calls them.
"""

import logging
from functools import partial
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only

log = logging.getLogger(__name__)

CALLS = ["log_hyperparams", "log_metrics", "log_graph", "save", "after_save_checkpoint", "finalize"]
OF_FILES = "write_all"  # a method of the harness's own loggers, which write files


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, whose events reach the disk in the background, ``flush_secs`` later.

    Lightning would wait for the disk whenever it has logged, which takes longer than a small
    network's step.
    """

    def save(self) -> None:
        """Leave it to the background; the settings are in the run's ``config.yaml``."""

    @rank_zero_only
    def write_all(self) -> None:
        """Wait until everything is in the file."""
        self.experiment.flush()


def guarded(logger: Logger) -> Logger:
    """Guard the calls that Lightning and the harness make of a logger."""
    failed: set[str] = set()
    for name in [*CALLS, OF_FILES]:
        if hasattr(logger, name):
            setattr(logger, name, partial(_call, logger, name, failed))
    return logger


def _call(logger: Logger, name: str, failed: set[str], *args: Any, **kwargs: Any) -> Any:
    """Make a call that the logger's class defines; log its first failure, and go on.

    A file may have room again later. A tracker gets nothing more: each call may wait for minutes.
    """
    is_tracker = not hasattr(logger, OF_FILES)
    if is_tracker and failed:
        return
    try:
        return getattr(type(logger), name)(logger, *args, **kwargs)
    except Exception as error:
        if name not in failed:
            # TensorBoard's message for a full disk is that a number is not supported.
            reason = error.__cause__ if isinstance(error.__cause__, OSError) else error
            what, rest = f"{type(logger).__name__}.{name}", " without it" if is_tracker else ""
            log.warning("%s has failed, and the run goes on%s: %s", what, rest, reason)
            log.info("The traceback:", exc_info=error)
        failed.add(name)
