from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's bar with the run's metrics alone."""

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """Leave out the logger's version, which the run's folder already tells."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return dict(metrics)
