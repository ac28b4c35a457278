"""Draw a picture of a test's outputs in TensorBoard, which never costs a run its result."""

import logging
import pickle
from abc import abstractmethod
from typing import Any, ClassVar

import pytorch_lightning as pl
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger

from harness.distributed.vote import gather
from harness.parity.evaluation import is_padding

log = logging.getLogger(__name__)


class Picture(pl.Callback):
    """Draw a test's outputs in TensorBoard; a subclass says what is kept and how it is drawn.

    Where the subclass raises an error in any process, the first process says so once, the traceback
    goes to ``run.log``, and nothing is drawn. Samples that only keep a process busy are left out.

    Attributes:
        name: the picture's name in TensorBoard, such as ``"test/confusion_matrix"``.
    """

    name: ClassVar[str]
    error: str | None = None

    @abstractmethod
    def reset(self) -> None:
        """Forget an earlier test."""

    @abstractmethod
    def update(self, outputs: Any, batch: Any) -> None:
        """Keep what the picture needs of what ``test_step`` returned for a batch, and of the batch.

        Both are on the module's device. Nothing may wait for other processes here.
        """

    @abstractmethod
    def kept(self) -> Any:
        """Return what this process has kept, on the CPU: it is sent to the first process."""

    @abstractmethod
    def draw(self, parts: list[Any]) -> Figure | None:
        """Draw what the processes have kept, in the order of their ranks; None draws nothing."""

    def on_test_start(self, *_: Any) -> None:
        """Start anew."""
        self.error = None
        self._try(self.reset)

    def on_test_batch_end(
        self, trainer: pl.Trainer, _: Any, outputs: Any, batch: Any, *place: int
    ) -> None:
        """Pass one batch to the subclass."""
        if trainer.loggers and not is_padding(trainer, *place):
            self._try(self.update, outputs, batch)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather what the processes have kept, and draw."""
        if not trainer.loggers:
            return
        # Bytes, because what cannot be pickled must fail before the processes wait for each other.
        mine = self._try(lambda: pickle.dumps(self.kept()))
        parts, errors = zip(*gather(trainer, (mine, self.error)), strict=True)
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
        """Call the subclass; after its first error, no more until the next test."""
        try:
            return None if self.error else function(*arguments)
        except Exception as error:
            log.info("%s has failed", type(self).__name__, exc_info=True)
            self.error = f"{type(error).__name__}: {error}"
        return None
