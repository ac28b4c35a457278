import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's bar with the run's metrics alone, brought up to date when it is drawn.

    Lightning does so after each batch, and reads the metrics from the device for it.

    Args:
        refresh_rate: times a second that it is drawn; 0 for no bar.
    """

    updated = 0.0

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
        if is_last or (now - self.updated) * self.refresh_rate >= 1:
            self.updated = now
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the logger's version, which the run's folder already tells."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return dict(metrics)
