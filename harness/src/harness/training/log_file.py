"""Print warnings on the screen, and write all messages to the run's log file."""

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

# Warnings that do not concern the user's run.
QUIET = (
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.13
    r".*does not have many workers which may be a bottleneck",  # a guess without a measurement
    r".*You're resuming from a checkpoint that ended before the epoch ended",  # intended
    r"Checkpoint directory .* exists and is not empty",  # a resumed run
    r".*torch.distributed.nn.functional.all_gather is deprecated",  # Lightning calls it
    r"The number of training batches .* is smaller than the logging interval",  # small data
    r"You are using a custom batch sampler .* for prediction",  # the library's sampler
    r"GPU available but not used",  # the user chose the CPU
    r"The `srun` command is available",  # the library reads Slurm's variables
    r"Grad strides do not match bucket view strides",  # a convolution with one input channel
)
# A warning that becomes an error: without an optimizer, a run trains nothing.
ERROR = r"`LightningModule.configure_optimizers` returned `None`"
ALWAYS = {"harness", "pytorch_lightning", "lightning", "lightning_fabric", "py.warnings"}
_configured: set[str] = set()  # names of the loggers whose handlers ``start`` has set
_latest: Path | None = None  # log file of the run in this process


def start(path: Path, packages: set[str], is_rank_zero: bool) -> None:
    """Set the handlers of this process's loggers.

    Args:
        path: the log file, which only rank 0 writes.
        packages: packages that the config names: their messages go to the log file, too.
        is_rank_zero: whether this process is rank 0.
    """
    global _latest
    _latest = path
    for message in QUIET:
        warnings.filterwarnings("ignore", message)
    warnings.filterwarnings("error", ERROR)
    logging.captureWarnings(True)
    threading.excepthook = show_thread_error
    screen = Screen(logging.WARNING)
    user_screen = Screen() if is_rank_zero else screen
    handlers: list[logging.Handler] = []
    if is_rank_zero:
        file = ForgivingFileHandler(path, delay=True)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(file)
    for name in _configured | ALWAYS | packages:
        logger = logging.getLogger(name)
        for handler in logger.handlers if name in _configured else ():
            handler.close()  # an earlier run in this process set it
        logger.setLevel(logging.INFO)
        logger.propagate = False
        # The screen also shows messages of level INFO from the user's code.
        logger.handlers = [user_screen if is_in_rules(name) else screen, *handlers]
        _configured.add(name)


def escape_controls(text: str) -> str:
    """Escape control characters in a message: it may quote a stranger's file."""
    return printable(text, keep="\n\t")


class Screen(logging.Handler):
    """Print messages to stderr, above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message to the current ``sys.stderr``, or drop it if stderr is a closed pipe."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname}: "
        with suppress(OSError):
            print(f"{level}{escape_controls(self.format(record))}", file=sys.stderr)


class ForgivingFileHandler(logging.FileHandler):
    """A log file that drops lines while the disk is full, instead of printing tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, or drop it if the disk is full."""
        with suppress(OSError):
            if self.stream is None:
                self.stream = self._open()
            self.stream.write(escape_controls(self.format(record)) + self.terminator)
            self.stream.flush()

    def close(self) -> None:
        """Close the file; drop buffered lines if the disk is full."""
        with suppress(OSError):
            super().close()


def show_thread_error(raised: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, unless a logger's thread failed on a full disk."""
    if not (isinstance(raised.exc_value, OSError) and raised.exc_value.errno in DISK_FULL):
        threading.__excepthook__(raised)


def write_traceback(error: BaseException) -> Path | None:
    """Append a traceback to the run's log file, and return the file's path.

    Every rank may call it, because any rank may fail. Returns ``None`` without a log file, or if
    the disk is full.
    """
    if _latest is not None:
        with suppress(OSError), _latest.open("a") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S ERROR\n"))
            file.writelines(traceback.format_exception(error))
            return _latest
    return None
