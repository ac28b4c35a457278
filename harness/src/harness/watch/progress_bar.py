"""Show the progress of a run on the screen, and give the screen to a debugger that asks for it."""

import inspect
import os
import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Show Lightning's bar with the run's metrics alone, updated only when it is drawn.

    Lightning updates it after each batch, and reads the metrics from the device for that.

    Args:
        refresh_rate: times a second that it is drawn; 0 for no bar.
    """

    updated_time = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Let ``breakpoint()`` end the bar, which would draw over the debugger's prompt."""
        super().setup(trainer, pl_module, stage)
        if self.is_enabled and "PYTHONBREAKPOINT" not in os.environ:
            sys.breakpointhook = self._debug

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give ``breakpoint()`` back its own way."""
        sys.breakpointhook = sys.__breakpointhook__
        super().teardown(trainer, pl_module, stage)

    def _debug(self, *_: Any, **__: Any) -> None:
        import pdb  # only debugging needs it

        self.disable()
        if self.progress is not None:
            self.progress.stop()
        pdb.Pdb().set_trace(inspect.currentframe().f_back)  # type: ignore[union-attr]

    def on_train_batch_end(self, trainer: pl.Trainer, *batch: Any) -> None:
        """Show the batch, if it is time."""
        *_, batch_idx = batch
        is_last = batch_idx + 1 == trainer.num_training_batches
        now = time.monotonic()
        if is_last or (now - self.updated_time) * self.refresh_rate >= 1:
            self.updated_time = now
            super().on_train_batch_end(trainer, *batch)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the logger's version, which the run's folder already tells."""
        return {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}
