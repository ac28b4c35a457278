"""Show the progress of a run on the screen."""

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

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Show the batch, if it is time."""
        is_last = batch_idx + 1 == trainer.num_training_batches
        now = time.monotonic()
        if is_last or (now - self.updated_time) * self.refresh_rate >= 1:
            self.updated_time = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the logger's version, which the run's folder already tells."""
        return {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}
