"""Modules and callbacks with state of their own, as researchers write them.

The first part keeps it where Lightning looks, the second part in plain attributes.
"""

import copy
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests_harness.modules import declared, several
from tests_harness.modules.classifiers import Classifier
from tests_harness.modules.data import BATCH_SIZE, NUM_TRAIN, Data


class ScheduledAdversaries(several.Adversaries):
    """A GAN with a spectral norm, drawn noise, a critic that steps more often, and schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = spectral_norm(nn.Linear(6, 1))
        self.register_buffer("fixed_noise", torch.randn(4, 3))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        fake = self.generator(torch.randn_like(x[:, :3]))
        loss_d = F.softplus(self.discriminator(fake.detach())) + F.softplus(-self.discriminator(x))
        self.update(optimizer_d, loss_d.mean())
        self.log("train/d", loss_d.mean())
        if batch_idx % 2 == 0:
            loss_g = F.softplus(-self.discriminator(fake)).mean()
            self.update(optimizer_g, loss_g)
            self.log("train/g", loss_g, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log("fixed", self.generator(self.fixed_noise).mean())

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(network.parameters(), lr=0.01, betas=(0.5, 0.9))
            for network in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


class BestMetrics(Classifier):
    """Metrics as the best-known template keeps them: a running mean, and the best so far."""

    def __init__(self) -> None:
        super().__init__()
        self.train_loss, self.val_loss = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.val_best = torchmetrics.MinMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.train_loss(loss)
        self.log("fit/loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_loss.update(F.cross_entropy(self(x), y), len(y))

    def on_validation_epoch_end(self) -> None:
        self.val_best(self.val_loss.compute())
        self.log("val/loss", self.val_loss.compute())
        self.log("val/best", self.val_best.compute())
        self.val_loss.reset()


class WarmsUp(declared.MaskedLanguage):
    """As transformers are trained: AdamW without decay of biases, warm-up and cosine by step."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 35)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [5])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RateByHand(Classifier):
    """Sets the rate in ``optimizer_step``, from the number of steps."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer = args[2]
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (1 + 0.1 * self.trainer.global_step)
        super().optimizer_step(*args, **kwargs)


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


class KeptAverage(Average):
    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = copy.deepcopy(state_dict["average"])


class Annealed(Classifier):
    """Counts its steps in a plain number, and weighs a term by it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = 0
        self.running = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.num_updates += 1
        loss = F.cross_entropy(self(x), y)
        self.running = 0.9 * self.running + 0.1 * loss.item()
        decay = sum(p.square().sum() for p in self.parameters())
        self.log("running", self.running)
        return loss + 0.02 * min(1.0, self.num_updates / 20) * decay


class Replay(Classifier):
    """Trains on this batch and on one of those before, which a plain list keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.buffer = [*self.buffer[-9:], batch]
        x, y = self.buffer[int(torch.randint(len(self.buffer), ()))]
        return F.cross_entropy(self(batch[0]), batch[1]) + 0.5 * F.cross_entropy(self(x), y)
