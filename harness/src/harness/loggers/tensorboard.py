"""Write TensorBoard's events without waiting for the disk."""

from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities import rank_zero_only


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
