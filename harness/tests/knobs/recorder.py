"""A callback that remembers what a run's other callbacks have done to its weights."""

from typing import Any, ClassVar

import pytorch_lightning as pl
from torch import Tensor

State = dict[str, Tensor]


class Recorder(pl.Callback):
    """Remember a module's weights after each step, and at validations."""

    after_steps: ClassVar[list[State]] = []
    validated: ClassVar[list[State]] = []

    def on_fit_start(self, *_: Any) -> None:
        for records in (self.after_steps, self.validated):
            records.clear()

    def on_train_batch_end(self, _: pl.Trainer, module: pl.LightningModule, *__: Any) -> None:
        self.after_steps.append(copied(module))

    def on_validation_epoch_start(self, _: pl.Trainer, module: pl.LightningModule) -> None:
        self.validated.append(copied(module))


def copied(module: pl.LightningModule) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
