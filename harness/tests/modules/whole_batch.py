"""Losses and states that depend on which samples a batch holds, as researchers write them.

On a share of the batch each of them is another loss; no strategy of several processes can know.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier


class RootMeanSquare(Classifier):
    """The root of a mean is no mean of roots."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x)[:, 0], y.to(x.dtype)).sqrt()


class InnerLoop(Classifier):
    """MAML: a step on the first half of a batch, the loss of the other half."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        half = (len(x) + 1) // 2
        inner = F.cross_entropy(self(x[:half]), y[:half])
        names, weights = zip(*self.net.named_parameters(), strict=True)
        slopes = torch.autograd.grad(inner, weights, create_graph=True)
        moved = {n: w - 0.1 * g for n, w, g in zip(names, weights, slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(self.net, moved, x[half:]), y[half:])


class OnlyWithClass(Classifier):
    """A term for batches that have a sample of a class."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss + self(x[y == 2]).square().mean() if (y == 2).any() else loss


class Prototypes(Classifier):
    """Pulls samples to the running mean of their class, which the step keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prototypes", torch.zeros(3, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        for label in y.unique():
            mean = logits.detach()[y == label].mean(0)
            self.prototypes[label] = 0.5 * self.prototypes[label] + 0.5 * mean
        return F.cross_entropy(logits, y) + F.mse_loss(logits, self.prototypes[y])


class Bank(Classifier):
    """Compares with the outputs of batches before, which a list of the module keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.bank = [*self.bank[-2:], logits.detach()]
        return F.cross_entropy(logits, y) + 0.1 * (logits @ torch.cat(self.bank).T).mean()


class Baseline(Classifier):
    """REINFORCE: a running mean of the reward, in a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.baseline = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        chosen = self(x).log_softmax(1).max(1)
        reward = (chosen.indices == y).to(x.dtype)
        self.baseline = 0.7 * self.baseline + 0.3 * float(reward.mean())
        return -((reward - self.baseline) * chosen.values).mean()
