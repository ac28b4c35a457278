import logging
from collections.abc import Callable
from typing import Any

from pytorch_lightning.loggers import Logger

log = logging.getLogger(__name__)

CALLS = ["log_hyperparams", "log_metrics", "log_graph", "save", "after_save_checkpoint", "finalize"]


def guarded(logger: Logger) -> Logger:
    """Let a logger that fails cost a run its curves in that logger, and not its result.

    The first failure of each call is told; the run goes on.
    """
    for name in CALLS:
        setattr(logger, name, _guarded(getattr(logger, name), f"{type(logger).__name__}.{name}"))
    return logger


def _guarded(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    has_failed = False

    def try_to_call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_failed
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not has_failed:
                log.warning("%s has failed, and the run goes on: %s", name, error)
                log.info("The traceback:", exc_info=error)
            has_failed = True

    return try_to_call
