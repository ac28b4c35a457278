import logging
import os
import time
import traceback
import warnings
from pathlib import Path

import pytorch_lightning as pl

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
    r"Grad strides do not match bucket view strides",  # of a convolution's single input channel
)
# Lightning says this wherever Slurm is installed; inside of a job it is worth knowing.
NOT_UNDER_SLURM = r"The `srun` command is available"
# Warnings of what is a mistake.
ERRORS = (r"`LightningModule.configure_optimizers` returned `None`",)
ALWAYS = {"harness", "pytorch_lightning", "lightning", "lightning_fabric", "py.warnings"}
_directed: set[str] = set()  # the loggers of this process that have handlers of ours


class LogFile(pl.Callback):
    """Show warnings on the screen, and write them and the rest to the run's log file.

    A callback, because spawned processes must set it up again.

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
        in_job = "SLURM_JOB_ID" in os.environ
        for message in QUIET if in_job else (*QUIET, NOT_UNDER_SLURM):
            warnings.filterwarnings("ignore", message)
        for message in ERRORS:
            warnings.filterwarnings("error", message)
        logging.captureWarnings(True)
        screen = logging.StreamHandler()
        screen.setLevel(logging.WARNING)
        screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handlers: list[logging.Handler] = [screen]
        if is_first_process:
            file = logging.FileHandler(self.path, delay=True)
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            handlers.append(file)
        for name in ALWAYS | self.packages:
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.propagate = False
            logger.handlers = list(handlers)
            _directed.add(name)


def write_traceback(error: BaseException) -> Path | None:
    """Append an exception's traceback to the run's log file, and return that, if there is one.

    Any process may do so: the one that fails need not be the first.
    """
    if LogFile.latest is None:
        return None
    try:
        with LogFile.latest.open("a") as file:
            file.write(time.strftime("%Y-%m-%d %H:%M:%S ERROR\n"))
            file.writelines(traceback.format_exception(error))
    except OSError:  # a disk that is full
        return None
    return LogFile.latest


def stop() -> None:
    """Direct the log records of this process nowhere: the run's folder goes."""
    LogFile.latest = None
    for name in _directed:
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            handler.close()
        logger.handlers = []
