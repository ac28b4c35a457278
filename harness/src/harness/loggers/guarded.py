"""Let a logger that fails cost a run its curves in that logger, and not its result."""

import logging
from typing import Any

from pytorch_lightning.loggers import Logger

log = logging.getLogger(__name__)

CALLS = ["log_hyperparams", "log_metrics", "log_graph", "save", "after_save_checkpoint", "finalize"]
OF_FILES = "write_all"  # a method of the harness's own loggers, which write files


def guarded(logger: Logger) -> Logger:
    """Guard the calls that Lightning and the harness make of a logger."""
    for name in [*CALLS, OF_FILES]:
        if hasattr(logger, name):
            setattr(logger, name, Guarded(logger, name))
    return logger


class Guarded:
    """A call of a logger whose first failure is logged; the run goes on.

    A file may have room again later. A tracker gets nothing more: each call may wait for minutes.
    """

    def __init__(self, logger: Logger, name: str) -> None:
        self.logger, self.name = logger, name
        self.has_failed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call that the logger's class defines."""
        is_tracker = not hasattr(self.logger, OF_FILES)
        if is_tracker and any(getattr(self.logger, name).has_failed for name in CALLS):
            return
        try:
            return getattr(type(self.logger), self.name)(self.logger, *args, **kwargs)
        except Exception as error:
            if not self.has_failed:
                name = f"{type(self.logger).__name__}.{self.name}"
                # TensorBoard's message for a full disk is that a number is not supported.
                reason = error.__cause__ if isinstance(error.__cause__, OSError) else error
                rest = " without it" if is_tracker else ""
                log.warning("%s has failed, and the run goes on%s: %s", name, rest, reason)
                log.info("The traceback:", exc_info=error)
            self.has_failed = True
