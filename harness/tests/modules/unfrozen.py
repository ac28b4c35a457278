"""Networks of which training freezes and unfreezes parts, as those who fine-tune do."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from tests.modules.classifiers import Classifier


class Backbone(pl.callbacks.BaseFinetuning):
    """Unfreezes the first layer at the second epoch, and gives it to the optimizer."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(
        self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class ByCallback(Classifier):
    """Is unfrozen by a callback."""

    def configure_callbacks(self) -> Any:
        return [Backbone()]

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.3, momentum=0.9)


class ByHooks(Classifier):
    """Unfreezes in the middle of an epoch, and freezes another part at the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.net[0].requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.net[-1].requires_grad_(False)


class OnOneRank(ByHooks):
    """Unfreezes in one process alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            super().on_train_batch_start(batch, batch_idx)


class InStep(Classifier):
    """Unfreezes where its step has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[0].requires_grad_(self.current_epoch > 0)
        return super().training_step(batch, batch_idx)
