"""A callback that remembers what a run's other callbacks have done to its weights."""

from pathlib import Path
from typing import Any, ClassVar

import pytorch_lightning as pl
from torch import Tensor

State = dict[str, Tensor]


class Recorder(pl.Callback):
    """Remember a module's weights after each step, and at validations, and what best.ckpt is."""

    after_steps: ClassVar[list[State]] = []
    validated: ClassVar[list[State]] = []
    best: ClassVar[list[tuple[str, str]]] = []  # the file that best.ckpt is, and the one it must be

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

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        callback: Any = trainer.checkpoint_callback
        if trainer.current_epoch == 0:
            return
        link = Path(callback.dirpath, "best.ckpt").resolve()
        self.best.append((link.name, Path(callback.best_model_path).name))


def copied(module: pl.LightningModule) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
