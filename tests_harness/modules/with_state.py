"""Modules and callbacks with state of their own, as researchers write them.

The first part keeps it where Lightning looks, the second part in plain attributes.
"""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from tests_harness.modules.classifiers import Classifier
from tests_harness.modules.data import BATCH_SIZE, NUM_TRAIN, Data


class Thaw(pl.callbacks.BaseFinetuning):
    """Gives the optimizer the first layer at the third epoch."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class Tunes(Classifier):
    """Trains what is not frozen."""

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


class Curriculum(Data):
    """Shows more samples in later epochs: with ``reload_dataloaders_every_n_epochs``."""

    def train_dataloader(self) -> Any:
        size = min(NUM_TRAIN, BATCH_SIZE * (1 + self.trainer.current_epoch))
        return self.loader(size, shuffle=True)


class Average(pl.Callback):
    """An average of the weights that says what it keeps, and which a validation sees."""

    def __init__(self, decay: float = 0.8) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.trained: dict[str, Tensor] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.average = self.average or copy.deepcopy(pl_module.state_dict())

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].lerp_(value, 1 - self.decay)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trained = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.average or self.trained)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.load_state_dict(self.trained)


class Replay(Classifier):
    """Trains on this batch and on one of those before, which a plain list keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.buffer = [*self.buffer[-9:], batch]
        x, y = self.buffer[int(torch.randint(len(self.buffer), ()))]
        return F.cross_entropy(self(batch[0]), batch[1]) + 0.5 * F.cross_entropy(self(x), y)
