"""Runs that the tests of features share: a network with buffers, a callback that remembers."""

from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

State = dict[str, Tensor]
WITH_BUFFERS = (
    *("model.net._target_=tests.features.runs.WithBuffers", "+model.net.num_hidden=64"),
    *("~model.net.hidden", "~model.net.dropout"),
)


class WithBuffers(nn.Module):
    """BatchNorm's statistics, and buffers that nothing may average: integers and truth values."""

    def __init__(self, in_features: int, num_classes: int, num_hidden: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Flatten(), nn.Linear(in_features, num_hidden), nn.BatchNorm1d(num_hidden)
        )
        self.second = nn.Linear(num_hidden, num_classes)
        self.register_buffer("positions", torch.arange(num_hidden))
        self.register_buffer("is_kept", torch.arange(num_hidden) > 0)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)[:, self.positions] * self.is_kept * self.scale
        return self.second(hidden.relu())


class Recorder(pl.Callback):
    """Remember a module's weights after each step, and at validations."""

    after_steps: ClassVar[list[State]] = []
    validated: ClassVar[list[State]] = []
    at_end: ClassVar[list[State]] = []  # at both hooks at the end of a validation

    def on_fit_start(self, *_: Any) -> None:
        self.after_steps.clear()
        self.validated.clear()
        self.at_end.clear()

    def on_train_batch_end(self, _: pl.Trainer, module: pl.LightningModule, *__: Any) -> None:
        self.after_steps.append(copied(module))

    def on_validation_epoch_start(self, _: pl.Trainer, module: pl.LightningModule) -> None:
        self.validated.append(copied(module))

    def on_validation_epoch_end(self, _: pl.Trainer, module: pl.LightningModule) -> None:
        self.at_end.append(copied(module))

    on_validation_end = on_validation_epoch_end


def copied(module: pl.LightningModule) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
