"""An image classifier and a GAN in the ways of Lightning's examples, which no package holds.

They import ``lightning.pytorch``, save hyper-parameters but for the backbone, and log under other
names than ours; the GAN has two optimizers under manual optimisation, and no validation.
"""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


class Backbone(nn.Module):
    """Two layers on a flattened image."""

    def __init__(self, hidden_dim: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Linear(28 * 28, hidden_dim)
        self.out = nn.Linear(hidden_dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 1, 28, 28) to logits of shape (B, 10)."""
        return self.out(torch.relu(self.hidden(x.flatten(1))))


class ImageClassifier(LightningModule):
    """Cross-entropy, logged in every stage under names of its own."""

    def __init__(self, backbone: nn.Module | None = None, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.backbone = backbone or Backbone()

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
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

    def __init__(
        self,
        image_shape: tuple[int, ...] = (1, 28, 28),
        latent_dim: int = 16,
        lr: float = 2e-4,
        betas: tuple[float, float] = (0.5, 0.999),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        num_pixels = int(torch.tensor(image_shape).prod())
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(64, 128),
            nn.BatchNorm1d(128, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, num_pixels),
            nn.Tanh(),
            nn.Unflatten(1, tuple(image_shape)),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_pixels, 64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(64, 1),
        )
        self.validation_z = torch.randn(4, latent_dim)  # not a buffer, as in the example
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z: Tensor) -> Tensor:
        """Images from noise of shape (B, latent_dim)."""
        return self.generator(z)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """One step of each optimizer; each sees the parameters of its own network only."""
        images, _ = batch
        of_generator, of_discriminator = self.optimizers()
        z = torch.randn(len(images), self.hparams.latent_dim).type_as(images)
        real, fake = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        loss = F.binary_cross_entropy_with_logits

        self.toggle_optimizer(of_generator)
        g_loss = loss(self.discriminator(self(z)), real.type_as(images))
        of_generator.zero_grad()
        self.manual_backward(g_loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        of_real = loss(self.discriminator(images), real.type_as(images))
        of_fake = loss(self.discriminator(self(z).detach()), fake.type_as(images))
        d_loss = (of_real + of_fake) / 2
        of_discriminator.zero_grad()
        self.manual_backward(d_loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def on_train_epoch_end(self) -> None:
        """Send pictures to every logger, whether it can take them or not, as the example does."""
        images = self(self.validation_z.type_as(self.generator[0].weight))
        for logger in self.loggers:
            logger.experiment.add_images("generated_images", images, self.current_epoch)

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        """An optimizer for each network."""
        settings = {"lr": self.hparams.lr, "betas": tuple(self.hparams.betas)}
        return (
            torch.optim.Adam(self.generator.parameters(), **settings),
            torch.optim.Adam(self.discriminator.parameters(), **settings),
        )
