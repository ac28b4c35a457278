"""Show warnings on the screen, and write them and other messages to the run's log file."""

import logging
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

from harness.errors import printable
from harness.files import DISK_FULL
from harness.targets import is_in_rules

# Warnings that say nothing about the user's run.
QUIET = (
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.13
    r".*does not have many workers which may be a bottleneck",  # a guess without a measurement
    r".*You're resuming from a checkpoint that ended before the epoch ended",  # as intended
    r"Checkpoint directory .* exists and is not empty",  # of a resumed run
    r".*torch.distributed.nn.functional.all_gather is deprecated",  # Lightning calls it
    r"The number of training batches .* is smaller than the logging interval",  # of small data
    r"You are using a custom batch sampler .* for prediction",  # the harness's own
    r"GPU available but not used",  # the user has chosen the CPU
    r"The `srun` command is available",  # the harness looks at Slurm itself
    r"Grad strides do not match bucket view strides",  # of a convolution's single input channel
)
# A warning about a mistake.
ERROR = r"`LightningModule.configure_optimizers` returned `None`"
ALWAYS = {"harness", "pytorch_lightning", "lightning", "lightning_fabric", "py.warnings"}
_configured: set[str] = set()  # names of this process's loggers that have our handlers
_latest: Path | None = None  # log file of this process's run


def start(path: Path, packages: set[str], is_first_process: bool) -> None:
    """Configure this process's loggers, of the packages as well that belong to the run.

    Only the run's first process writes to the file.
    """
    global _latest
    _latest = path
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("error", ERROR)
    logging.captureWarnings(True)
    threading.excepthook = show_thread_error
    screen = Screen(logging.WARNING)
    of_owner = Screen() if is_first_process else screen
    handlers: list[logging.Handler] = []
    if is_first_process:
        file = ForgivingFileHandler(path, delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    for name in _configured | ALWAYS | packages:
        logger = logging.getLogger(name)
        for handler in logger.handlers if name in _configured else ():
            handler.close()  # of an earlier run in this process
        logger.setLevel(logging.INFO)
        logger.propagate = False
        # The owner's code has the screen for what it says at level INFO, too.
        logger.handlers = [of_owner if is_in_rules(name) else screen, *handlers]
        _configured.add(name)


def safe(text: str) -> str:
    """Escape what a terminal would obey in a message, which may quote a stranger's file."""
    return printable(text, keep="\n\t")


class Screen(logging.Handler):
    """Show messages; a progress bar that is drawn now lets them pass above it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line to what is stderr now, unless nobody reads it any more."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        with suppress(OSError):
            print(f"{level}{safe(self.format(record))}", file=sys.stderr)


class ForgivingFileHandler(logging.FileHandler):
    """A log file that loses lines on a full disk, where others show tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line if there is room."""
        with suppress(OSError):
            if self.stream is None:
                self.stream = self._open()
            self.stream.write(safe(self.format(record)) + self.terminator)
            self.stream.flush()

    def close(self) -> None:
        """Drop lines that still wait for room."""
        with suppress(OSError):
            super().close()


def show_thread_error(raised: threading.ExceptHookArgs) -> None:
    """Show the traceback of a thread, unless a logger's thread met a full disk."""
    if not (isinstance(raised.exc_value, OSError) and raised.exc_value.errno in DISK_FULL):
        threading.__excepthook__(raised)


def write_traceback(error: BaseException) -> Path | None:
    """Append a traceback to the run's log file and return its path; ``None`` if there is none.

    Any process may do so, as the one that fails need not be the first.
    """
    if _latest is not None:
        with suppress(OSError), _latest.open("a") as file:  # the disk may be full
            file.write(time.strftime("%Y-%m-%d %H:%M:%S ERROR\n"))
            file.writelines(traceback.format_exception(error))
            return _latest
    return None
