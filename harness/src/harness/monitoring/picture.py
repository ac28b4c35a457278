"""Draw a picture of a test's outputs in TensorBoard. An error in the drawing stops no run."""

import logging
import pickle
from abc import abstractmethod
from typing import Any, ClassVar

import pytorch_lightning as pl
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger

from harness.distributed.gather import gather
from harness.parity.combine_values import is_padding

log = logging.getLogger(__name__)


class Picture(pl.Callback):
    """Base class of callbacks that draw a test's outputs in TensorBoard.

    A subclass collects data from each batch in ``update``, returns it in ``kept``, and draws the
    data of all ranks in ``draw``. If the subclass raises an error on any rank, rank 0 logs one
    warning, the traceback goes to ``run.log``, and nothing is drawn. Padding samples, which give
    each rank equally many batches, are left out.

    Attributes:
        name: the picture's name in TensorBoard, such as ``"test/confusion_matrix"``.
    """

    name: ClassVar[str]
    error: str | None = None

    @abstractmethod
    def reset(self) -> None:
        """Discard the data of an earlier test."""

    @abstractmethod
    def update(self, outputs: Any, batch: Any) -> None:
        """Collect data from a batch, and from the outputs of ``test_step`` for this batch.

        Both are on the module's device. Call no collective operation here.
        """

    @abstractmethod
    def kept(self) -> Any:
        """Return the data of this rank, on the CPU; the run pickles it and sends it to rank 0."""

    @abstractmethod
    def draw(self, parts: list[Any]) -> Figure | None:
        """Draw the data of all ranks, in the order of the ranks; ``None`` draws nothing."""

    def on_test_start(self, *_: Any) -> None:
        """Reset the error and the subclass."""
        self.error = None
        self._try(self.reset)

    def on_test_batch_end(
        self, trainer: pl.Trainer, _: Any, outputs: Any, batch: Any, *indices: int
    ) -> None:
        """Pass one batch to the subclass."""
        if trainer.loggers and not is_padding(trainer, *indices):
            self._try(self.update, outputs, batch)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the data of all ranks, and draw on rank 0."""
        if not trainer.loggers:
            return
        # Pickle here, so that an object that cannot be pickled fails before the collective.
        pickled = self._try(lambda: pickle.dumps(self.kept()))
        parts, errors = zip(*gather(trainer, (pickled, self.error)), strict=True)
        self.error = next(filter(None, errors), None)
        if trainer.is_global_zero:
            self._try(self._draw, trainer, parts)
            if self.error:
                log.warning("%s is not drawn: %s", type(self).__name__, self.error)

    def _draw(self, trainer: pl.Trainer, parts: list[bytes]) -> None:
        figure = self.draw([pickle.loads(part) for part in parts])
        for logger in trainer.loggers:
            if figure is not None and isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(self.name, figure, trainer.global_step)

    def _try(self, function: Any, *arguments: Any) -> Any:
        """Call a function of the subclass, unless an earlier call has failed in this test."""
        try:
            return None if self.error else function(*arguments)
        except Exception as error:
            log.info("%s has failed.", type(self).__name__, exc_info=True)
            self.error = f"{type(error).__name__}: {error}"
        return None
