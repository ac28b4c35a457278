"""A callback that remembers what a run's other callbacks have done to its weights."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor

State = dict[str, Tensor]


class Recorder(pl.Callback):
    """Remember a module's weights after each step, and at each validation."""

    after_steps: list[State] = []
    validated: list[State] = []
    best: list[tuple[str, str]] = []  # where best.ckpt points to, and the best as it is known

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for kept in (self.after_steps, self.validated, self.best):
            kept.clear()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.after_steps.append(copied(pl_module))

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.validated.append(copied(pl_module))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callback: Any = trainer.checkpoint_callback
        link = f"{callback.dirpath}/best.ckpt"
        self.best.append((link, callback.best_model_path))


def copied(module: pl.LightningModule) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
