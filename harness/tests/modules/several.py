"""Several optimizers, backward passes or training loaders, as researchers write them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import Classifier, OneLoss


class Adversaries(OneLoss):
    """A GAN as Lightning's example writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(3, 6), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        self.toggle_optimizer(optimizer_g)
        loss_g = F.softplus(-self.discriminator(self.generator(x[:, :3]))).mean()
        self.update(optimizer_g, loss_g)
        self.toggle_optimizer(optimizer_d)
        fake = self.discriminator(self.generator(x[:, :3]).detach())
        loss_d = (F.softplus(fake) + F.softplus(-self.discriminator(x))).mean()
        self.update(optimizer_d, loss_d)
        self.log_dict({"train/g": loss_g, "train/d": loss_d})

    def update(self, optimizer: Any, loss: Tensor) -> None:
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)

    def loss(self, batch: Any) -> Tensor:
        return self.discriminator(self.generator(batch[0][:, :3])).mean()

    def configure_optimizers(self) -> Any:
        networks = self.generator, self.discriminator
        return [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]


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


class Lbfgs(Classifier):
    """Calls its closure several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class TwoTasks(Classifier):
    """A loader for each task, as Lightning combines them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.train_loss(*batch["a"]) + 0.5 * self(batch["b"][0]).square().mean()
