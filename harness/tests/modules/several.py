"""Several optimizers, backward passes or training loaders, as researchers write them."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import Classifier


class Adversaries(pl.LightningModule):
    """A GAN as Lightning's example writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(3, 6), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        noise = x[:, :3]
        self.toggle_optimizer(optimizer_g)
        loss_g = F.softplus(-self.discriminator(self.generator(noise))).mean()
        self.update(optimizer_g, loss_g)
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        fake = self.discriminator(self.generator(noise).detach())
        loss_d = (F.softplus(fake) + F.softplus(-self.discriminator(x))).mean()
        self.update(optimizer_d, loss_d)
        self.untoggle_optimizer(optimizer_d)
        self.log_dict({"train/g": loss_g, "train/d": loss_d})

    def update(self, optimizer: Any, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.discriminator(self.generator(batch[0][:, :3])).mean())

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]


class AccumulatesByHand(Classifier):
    """Two optimizers, which step after every second batch and at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.manual_backward(F.cross_entropy(self(x), y) / 2)
        if batch_idx % 2 or self.trainer.is_last_batch:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        body, head = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.SGD(body, lr=0.3), torch.optim.AdamW(head, lr=0.02)]


class SharpnessAware(Classifier):
    """SAM: a step uphill, and from there the gradient of a step down."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self(x), y))
        parameters = [p for p in self.parameters() if p.grad is not None]
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            uphill = [0.05 * p.grad / norm for p in parameters]
            for p, move in zip(parameters, uphill, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        with torch.no_grad():
            for p, move in zip(parameters, uphill, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


class Lbfgs(Classifier):
    """Calls its closure several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoTasks(Classifier):
    """A loader for each task, as Lightning combines them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        features = self.net[:2](x)
        return self.net[2](features), self.head(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["a"]
        same = batch["b"][0]
        return F.cross_entropy(self(x)[0], y) + 0.5 * F.mse_loss(self(same)[1], same)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0])[0], batch[1]))
