"""Modules whose effect begins after some steps or epochs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.modules.classifiers import BatchNorm, Classifier


def supervised_contrastive(features: Tensor, y: Tensor) -> Tensor:
    """Compare the samples of a batch with each other (SupCon)."""
    features = F.normalize(features, dim=1)
    logits = features @ features.T / 0.5 - 1e9 * torch.eye(len(y), dtype=features.dtype)
    is_same = (y.unsqueeze(1) == y).double().fill_diagonal_(0)
    terms = logits.log_softmax(1) * is_same
    return -(terms.sum(1) / is_same.sum(1).clamp(min=1)).mean()


class LateTerm(Classifier):
    """Adds a contrastive term from its third epoch on."""

    def begins(self) -> bool:
        return self.current_epoch >= 2

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        return loss + supervised_contrastive(logits, y) if self.begins() else loss


class LateTermWithinEpoch(LateTerm):
    """Adds it from a step on."""

    def begins(self) -> bool:
        return self.global_step >= 7


class TermAtTheEnd(LateTerm):
    """Adds it for the last steps of training."""

    def begins(self) -> bool:
        return self.global_step > 0.7 * self.trainer.estimated_stepping_batches


class RampedTerm(Classifier):
    """Ramps a consistency term up, in which samples are compared (Mean Teacher)."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        ramp = math.exp(-5 * (1 - min(1.0, self.global_step / 10)) ** 2)
        return F.cross_entropy(logits, y) + ramp * logits.std(0).mean()


class RampedPairs(Classifier):
    """Ramps a term up that pulls samples of a class together; one sample alone has none."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        ramp = math.exp(-5 * (1 - min(1.0, self.global_step / 10)) ** 2)
        is_same = (y.unsqueeze(1) == y).to(x)
        distances = (logits.unsqueeze(1) - logits).square().sum(2)
        return F.cross_entropy(logits, y) + ramp * (distances * is_same).sum() / is_same.sum()


class LateDropout(Classifier):
    """Drops from the second epoch on."""

    rate_of_dropout = 0.0

    def on_train_epoch_start(self) -> None:
        self.rate_of_dropout = 0.3 * (self.current_epoch > 0)

    def forward(self, x: Tensor) -> Any:
        return self.net(F.dropout(x, self.rate_of_dropout, self.training))


class LateModuleDropout(Classifier):
    """Sets a module's probability within an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.dropout.p = 0.3 * (self.global_step > 6)

    def forward(self, x: Tensor) -> Any:
        return self.net(self.dropout(x))


class LateNoise(Classifier):
    """Adds noise after a warm-up, which ends within an epoch."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.global_step >= 7:
            x = x + 0.3 * torch.randn_like(x)
        return F.cross_entropy(self(x), y)


class LateMixup(Classifier):
    """Mixes samples in the second epoch only (switched off at the end, as YOLOX)."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.current_epoch != 1:
            return F.cross_entropy(self(x), y)
        other = torch.randperm(len(x))
        logits = self(0.7 * x + 0.3 * x[other])
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[other])


class LateBatchNorm(BatchNorm):
    """Its statistics are fixed for an epoch, and those of the batch from then on."""

    def on_train_epoch_start(self) -> None:
        self.net[1].train(self.current_epoch > 0)


class DeferredWeights(Classifier):
    """Weights classes from the second epoch on (deferred re-weighting, LDAM)."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 4.0, 9.0]).to(x) if self.current_epoch else None
        return F.cross_entropy(self(x), y, weights)


class HardExamples(Classifier):
    """Keeps the hardest half of a batch, after a warm-up (OHEM)."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self(x), y, reduction="none")
        if self.global_step >= 5:
            losses = losses.topk(max(1, len(losses) // 2)).values
        return losses.mean()


class LateQueue(Classifier):
    """Compares with a queue of outputs as soon as it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(0, 3, dtype=torch.float64)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        if len(self.queue) >= 12:
            loss = loss + (logits @ self.queue.T).exp().mean().log()
        self.queue = torch.cat([self.queue, logits.detach()])[-12:]
        return loss
