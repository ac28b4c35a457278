"""An image classifier and a GAN in the ways of Lightning's examples, which no package holds.

They import ``lightning.pytorch``, save hyper-parameters but for the backbone, and log under other
names than ours; the GAN has two optimizers under manual optimisation, and no validation.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

NUM_PIXELS, NUM_LATENT = 28 * 28, 16


class ImageClassifier(LightningModule):
    """Cross-entropy, logged in every stage under names of its own."""

    def __init__(self, backbone: nn.Module | None = None, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        layers = (nn.Flatten(), nn.Linear(NUM_PIXELS, 128), nn.ReLU(), nn.Linear(128, 10))
        self.backbone = backbone or nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, 28, 28) to logits of shape (B, 10)."""
        return self.backbone(x)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Log the loss of a step, and its mean over the epoch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss of a step as well."""
        self.log("valid_loss", self._loss(batch), on_step=True, on_epoch=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits; the labels are left out."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The learning rate comes from what was saved."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class GAN(LightningModule):
    """A generator and a discriminator that take turns within a step."""

    def __init__(self, lr: float = 2e-4, betas: tuple[float, float] = (0.5, 0.999)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            *(nn.Linear(NUM_LATENT, 128), nn.BatchNorm1d(128, 0.8), nn.LeakyReLU(0.2, True)),
            *(nn.Linear(128, NUM_PIXELS), nn.Tanh(), nn.Unflatten(1, (1, 28, 28))),
        )
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(NUM_PIXELS, 1))
        self.validation_z = torch.randn(4, NUM_LATENT)  # not a buffer, as in the example
        self.example_input_array = torch.zeros(2, NUM_LATENT)

    def forward(self, z: Tensor) -> Tensor:
        """Images from noise of shape (B, latent)."""
        return self.generator(z)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """One step of each optimizer; each sees the parameters of its own network only."""
        images, _ = batch
        of_generator, of_discriminator = self.optimizers()
        z = torch.randn(len(images), NUM_LATENT).type_as(images)
        g_loss = self.turn(of_generator, lambda: F.softplus(-self.discriminator(self(z))).mean())
        d_loss = self.turn(
            of_discriminator,
            lambda: (
                F.softplus(-self.discriminator(images))
                + F.softplus(self.discriminator(self(z).detach()))
            ).mean(),
        )
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def turn(self, optimizer: Any, loss_of: Callable[[], Tensor]) -> Tensor:
        """Let an optimizer step."""
        self.toggle_optimizer(optimizer)
        loss = loss_of()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return loss

    def on_train_epoch_end(self) -> None:
        """Send pictures to every logger, whether it can take them or not, as the example does."""
        images = self(self.validation_z.type_as(self.generator[0].weight))
        for logger in self.loggers:
            logger.experiment.add_images("generated_images", images, self.current_epoch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """An optimizer for each network."""
        networks, settings = (self.generator, self.discriminator), dict(self.hparams)
        return [torch.optim.Adam(network.parameters(), **settings) for network in networks]
