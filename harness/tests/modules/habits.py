"""Other habits of researchers: random numbers in a step, states, statistics of the data."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import Classifier
from tests.modules.one_loss import OneLoss
from tests.modules.sequences import PaddedSums


class Autoencoder(OneLoss):
    """A VAE, which draws in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Linear(2, 6)

    def forward(self, x: Tensor) -> Any:
        mean, log_variance = self.net(x).chunk(2, 1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        outputs, mean, log_variance = self(x)
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return F.mse_loss(outputs, x) + 0.1 * kl


class Mixup(Classifier):
    """Mixes each sample with another one of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        other = torch.randperm(len(x), device=x.device)
        logits = self(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[other])


class GradientPenalty(Classifier):
    """Differentiates a gradient, and adds a term that has no samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        logits = self(x)
        (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        decay = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(logits, y) + 0.1 * penalty + 0.001 * decay


class Stateful(PaddedSums):
    """Goes on from the state in which the batch before has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 4, batch_first=True)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        outputs, hidden = self.rnn(x, hidden)
        return self.head(outputs), hidden

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        outputs, hidden = self(x, self.hidden)
        self.hidden = hidden.detach()
        return F.mse_loss(outputs, y[..., :4])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.mse_loss(self(batch[0])[0], batch[1][..., :4]))


class Standardised(Classifier):
    """Computes the mean of the training data before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def on_fit_start(self) -> None:
        loader = self.trainer.datamodule.train_dataloader()
        self.mean.copy_(torch.cat([x for x, _ in loader]).mean(0))

    def forward(self, x: Tensor) -> Any:
        return self.net(x - self.mean)


class EpochLoss(Classifier):
    """Collects losses of training steps, and logs their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("fit/loss", torch.stack(self.losses).mean())
        self.losses.clear()
