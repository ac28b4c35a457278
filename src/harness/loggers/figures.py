import pytorch_lightning as pl
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger


def add_figure(trainer: pl.Trainer, name: str, figure: Figure) -> None:
    """Write a figure to every TensorBoard logger of the run."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, trainer.global_step)
