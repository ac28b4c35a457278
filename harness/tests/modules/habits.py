"""Habits of researchers that depend on what a batch holds: draws, states, statistics, losses.

On a local batch most compute another step; a few declare the divisor of their loss.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import mean_over, sum_over
from tests.modules.classifiers import Classifier, OneLoss


class ClassWeights(Classifier):
    def __init__(self, is_declared: bool = False) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 9.0]))
        self.is_declared = is_declared

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.cross_entropy(self(x), y)
        return mean_over(loss, self.cross_entropy.weight[y].sum()) if self.is_declared else loss


class SumOfLosses(Classifier):
    """Processes are averaged, and their sums must not be."""

    rate = 0.03

    def __init__(self, is_declared: bool = False) -> None:
        super().__init__()
        self.is_declared = is_declared

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self(x), y, reduction="sum")
        return sum_over(loss) if self.is_declared else loss


class RootMeanSquare(Classifier):
    """The root of a mean is no mean of roots."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x)[:, 0], y.to(x.dtype)).sqrt()


class OnlyWithClass(Classifier):
    """A term for batches that have a sample of a class."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        return loss + self(x[y == 2]).square().mean() if (y == 2).any() else loss


class Noise(Classifier):
    """Draws in forward, as a VAE."""

    def forward(self, x: Tensor) -> Any:
        return self.net(x + 0.3 * torch.randn_like(x) if self.training else x)


class Mixup(Classifier):
    """Mixes each sample with another one of the batch."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        other = torch.randperm(len(x), device=x.device)
        logits = self(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[other])


class GradientPenalty(Classifier):
    """Differentiates a gradient, and adds a term that has no samples."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        logits = self(x)
        (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        decay = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(logits, y) + 0.1 * penalty + 0.001 * decay


class Bank(Classifier):
    """Compares with the outputs of batches before, which a list of the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.bank = [*self.bank[-2:], logits.detach()]
        return F.cross_entropy(logits, y) + 0.1 * (logits @ torch.cat(self.bank).T).mean()


class Stateful(OneLoss):
    """Continues from the state at the end of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor, hidden: Any = None) -> Any:
        outputs, hidden = self.rnn(x, hidden)
        return self.head(outputs), hidden

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def loss(self, batch: Any) -> Tensor:
        outputs, hidden = self(batch[0], self.hidden if self.training else None)
        if self.training:
            self.hidden = hidden.detach()
        return F.mse_loss(outputs, batch[1])


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

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("fit/loss", torch.stack(self.losses).mean())
