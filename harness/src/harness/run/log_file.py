"""Show warnings on the screen, and write them and the rest to the run's log file."""

import logging
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl

from harness.files import FULL

# Warnings that say nothing about the user's run.
QUIET = (
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.13
    r".*does not have many workers which may be a bottleneck",  # said without measuring
    r".*You're resuming from a checkpoint that ended before the epoch ended",  # exactly so
    r"Checkpoint directory .* exists and is not empty",  # a run that goes on
    r".*torch.distributed.nn.functional.all_gather is deprecated",  # Lightning calls it
    r"The number of training batches .* is smaller than the logging interval",  # of small data
    r"You are using a custom batch sampler .* for prediction",  # the harness's own
    r"GPU available but not used",  # somebody has chosen the CPU
    r"The `srun` command is available",  # the harness looks at Slurm itself
    r"Grad strides do not match bucket view strides",  # of a convolution's single input channel
)
# A warning of what is a mistake.
ERROR = r"`LightningModule.configure_optimizers` returned `None`"
ALWAYS = {"harness", "pytorch_lightning", "lightning", "lightning_fabric", "py.warnings"}
_directed: set[str] = set()  # the loggers of this process that have handlers of ours


class LogFile(pl.Callback):
    """Direct the log records of each process; a callback, because spawned processes need it.

    Args:
        path: the log file; only the first process writes to it.
        packages: whose messages are the run's, besides those of the harness and of Lightning.
    """

    latest: Path | None = None  # of the run that this process computes

    def __init__(self, path: Path, packages: set[str]) -> None:
        self.path, self.packages = path, packages

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Direct the log records of this process."""
        self.start(trainer.is_global_zero)

    def start(self, is_first_process: bool) -> None:
        """Direct the log records of this process; a second call changes nothing."""
        stop()  # of an earlier run in this process
        LogFile.latest = self.path
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        warnings.filterwarnings("error", ERROR)
        logging.captureWarnings(True)
        threading.excepthook = show_of_thread
        screen = logging.StreamHandler()
        screen.setLevel(logging.WARNING)
        screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handlers: list[logging.Handler] = [screen]
        if is_first_process:
            file = File(self.path, delay=True)
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            handlers.append(file)
        for name in ALWAYS | self.packages:
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.handlers = list(handlers)
            _directed.add(name)


class File(logging.FileHandler):
    """The log file, of which a full disk leaves lines out; the screen has what counts of them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line if there is room."""
        with suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Show no traceback of a line that found no room."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        """Leave out what still waits for room."""
        with suppress(OSError):
            super().close()


def show_of_thread(raised: threading.ExceptHookArgs) -> None:
    """Show the traceback of a thread, but not that of a logger's which found no room."""
    if not (isinstance(raised.exc_value, OSError) and raised.exc_value.errno in FULL):
        threading.__excepthook__(raised)


def write_traceback(error: BaseException) -> Path | None:
    """Append a traceback to the run's log file, and return that; ``None`` if there is none.

    Any process may do so: the one that fails need not be the first.
    """
    if LogFile.latest is not None:
        with suppress(OSError), LogFile.latest.open("a") as file:  # the disk may be full
            file.write(time.strftime("%Y-%m-%d %H:%M:%S ERROR\n"))
            file.writelines(traceback.format_exception(error))
            return LogFile.latest
    return None


def stop() -> None:
    """Direct the log records of this process nowhere: the run's folder goes."""
    LogFile.latest = None
    for name in _directed:
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            handler.close()
        logger.handlers = []
