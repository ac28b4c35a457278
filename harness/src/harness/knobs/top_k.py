"""The checkpoints that ``callbacks=top_k`` keeps."""

from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

from harness.checkpoints.lookup import link


class TopK(ModelCheckpoint):
    """Keep the ``save_top_k`` best checkpoints; ``best.ckpt`` links to the best at any time."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, and set the link."""
        super().on_validation_end(trainer, pl_module)
        self.link_best(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do the same for a value of the training."""
        super().on_train_epoch_end(trainer, pl_module)
        self.link_best(trainer)

    def link_best(self, trainer: pl.Trainer) -> None:
        """Let ``best.ckpt`` be the best file, if a full disk has left room for it."""
        best = Path(self.best_model_path)  # "" before the first
        if trainer.is_global_zero and best.is_file() and best.name != "best.ckpt":
            link(best.with_name("best.ckpt"), best.name)
