"""State that a call moves: once a step, and once for each part where calls are split (dp)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import Classifier, layers


class CountingHook(Classifier):
    """Anneals a temperature by the calls that a forward hook has counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += int(self.training)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x) / (1 + 0.9**self.calls), y)


class Annealed(nn.Module):
    """Sharpens its input with each call (Gumbel-softmax)."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(self.training)
        return x / (1 + 0.9**self.calls)


class Observed(nn.Module):
    """Divides by a running size of its input, in a plain tensor (an observer of quantisation)."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.size = 0.9 * self.size + 0.1 * x.detach().abs().mean()
        return x / self.size


class RunningMeanStd(nn.Module):
    """Standardises by all samples that it has seen (as in reinforcement learning)."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean, self.square = 1.0, torch.zeros(8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += len(x)
            fraction = len(x) / self.count
            self.mean = self.mean.lerp(x.detach().mean(0).to(self.mean), fraction)
            self.square = self.square.lerp(x.detach().square().mean(0).to(self.mean), fraction)
        return (x - self.mean) / (self.square + 0.1).sqrt()


class PowerIteration(nn.Module):
    """Divides a layer's weight by its norm, one iteration a call (spectral norm by hand)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.u = nn.Linear(8, 8), torch.ones(8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        with torch.no_grad():
            v = F.normalize(weight.T @ self.u.to(weight), dim=0)
            u = F.normalize(weight @ v, dim=0)
            if self.training:
                self.u = u
        return F.linear(x, weight / (u @ weight @ v), self.layer.bias)


class Codebook(nn.Module):
    """Quantises, and moves its codes to what they stand for (VQ-VAE with EMA, in buffers)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 32).view(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantised = self.codes[nearest]
        if self.training:
            for code in nearest.unique().tolist():
                self.codes[code] = self.codes[code].lerp(x.detach()[nearest == code].mean(0), 0.2)
        return x + (quantised - x).detach() * 0.5


class LengthCache(nn.Module):
    """Remembers a table for each number of features: it is right."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[1]
        if size not in self.tables:
            self.tables[size] = torch.linspace(-1, 1, size, dtype=x.dtype)
        return x + self.tables[size]


class WithPart(Classifier):
    """Has one of these behind its first layer."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.net = layers(globals()[part]())
