import logging
import os
import warnings
from pathlib import Path

import pytorch_lightning as pl

# Warnings that say nothing about the user's run.
QUIET = (
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 on torch 2.13
    r".*does not have many workers which may be a bottleneck",  # said without measuring
    r".*You're resuming from a checkpoint that ended before the epoch ended",  # exactly so
    r"Checkpoint directory .* exists and is not empty",  # a run that goes on
    r"Grad strides do not match bucket view strides",  # of a convolution's single input channel
)
# Lightning says this wherever Slurm is installed; inside of a job it is worth knowing.
NOT_UNDER_SLURM = r"The `srun` command is available"
# The first is this package.
LOGGERS = (
    __name__.partition(".")[0],
    "pytorch_lightning",
    "lightning",
    "lightning_fabric",
    "py.warnings",
)


class RunLog(pl.Callback):
    """Show warnings on the screen, and write them and the rest to the run's log file.

    A callback, because spawned processes must set it up again.

    Args:
        path: the log file; only the first process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Direct the log records of this process."""
        self.start(trainer.is_global_zero)

    def start(self, is_first_process: bool) -> None:
        """Direct the log records of this process; a second call changes nothing."""
        in_job = "SLURM_JOB_ID" in os.environ
        for message in QUIET if in_job else (*QUIET, NOT_UNDER_SLURM):
            warnings.filterwarnings("ignore", message)
        logging.captureWarnings(True)
        screen = logging.StreamHandler()
        screen.setLevel(logging.WARNING)
        screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        handlers: list[logging.Handler] = [screen]
        if is_first_process:
            file = logging.FileHandler(self.path, delay=True)
            file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            handlers.append(file)
        for name in LOGGERS:
            logger = logging.getLogger(name)
            logger.setLevel(logging.INFO)
            logger.propagate = False
            for handler in logger.handlers:  # of an earlier run in this process
                handler.close()
            logger.handlers = handlers


def stop() -> None:
    """Direct the log records of this process nowhere: the run's folder goes."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for handler in logger.handlers:
            handler.close()
        logger.handlers = []
