"""Tables with a row for each training sample, as methods for noisy or missing labels keep them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier
from tests.modules.data import NUM_TRAIN


class Table(Classifier):
    """Loses by a table as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, index = batch
        loss = self.loss_of(self(x), y, index)
        self.log("train/loss", loss)
        return loss

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch[:2], batch_idx)


class SoftLabels(Table):
    """Runs a mean of its own predictions for each sample, in a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q = torch.full((NUM_TRAIN, 3), 1 / 3, dtype=torch.float64)

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        p = logits.detach().softmax(1)
        self.q[index] = 0.7 * self.q[index] + 0.3 * p
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, self.q[index])


class EarlyLearning(SoftLabels):
    """Early-learning regularisation (ELR)."""

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        p = logits.softmax(1).clamp(1e-4, 1 - 1e-4)
        q = p.detach() / p.detach().sum(1, keepdim=True)
        self.q[index] = 0.7 * self.q[index] + 0.3 * q
        similarity = (self.q[index] * p).sum(1)
        return F.cross_entropy(logits, y) + 3 * (1 - similarity).log().mean()


class InstanceBank(SoftLabels):
    """The same table in a buffer, written behind the loss."""

    def __init__(self) -> None:
        super().__init__()
        table = self.q
        del self.q
        self.register_buffer("q", table)

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, y) + F.cross_entropy(logits, self.q[index].clone())
        self.q[index] = 0.5 * self.q[index] + 0.5 * logits.detach().softmax(1)
        return loss


class TemporalEnsemble(Table):
    """Takes its targets from an epoch's end (temporal ensembling)."""

    def __init__(self) -> None:
        super().__init__()
        self.ensemble = torch.zeros(NUM_TRAIN, 3, dtype=torch.float64)
        self.targets, self.outputs = self.ensemble.clone(), self.ensemble.clone()

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        p = logits.softmax(1)
        self.outputs[index] = p.detach()
        return F.cross_entropy(logits, y) + (p - self.targets[index]).square().mean()

    def on_train_epoch_end(self) -> None:
        self.ensemble = 0.6 * self.ensemble + 0.4 * self.outputs
        self.targets = self.ensemble / (1 - 0.6 ** (self.current_epoch + 1))


class LossHistory(Table):
    """Weights each sample by the losses that it had, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[int, float] = {}

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, y, reduction="none")
        past = torch.tensor([self.history.get(i, 1.0) for i in index.tolist()]).to(losses)
        self.history |= dict(zip(index.tolist(), losses.tolist(), strict=True))
        return (losses * past).mean()


class Forgetting(Table):
    """Weights samples by whether they were right, and how often forgotten (forgetting events)."""

    def __init__(self) -> None:
        super().__init__()
        self.was_right = torch.zeros(NUM_TRAIN, dtype=torch.bool)
        self.forgotten = torch.zeros(NUM_TRAIN)

    def loss_of(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        weights = 2 - self.was_right[index].to(logits.dtype) + self.forgotten[index]
        is_right = logits.argmax(1) == y
        self.forgotten[index] += (self.was_right[index] & ~is_right).to(self.forgotten)
        self.was_right[index] = is_right
        return (F.cross_entropy(logits, y, reduction="none") * weights).mean()
