"""State that hooks move by the samples of their own rank, outside the step, in plain attributes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier


class RememberedLogits(Classifier):
    """Keeps the logits of the last step, for a hook."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.out, self.labels = logits.detach(), y
        return self.compare(logits, y)

    def compare(self, logits: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class Centred(RememberedLogits):
    """Subtracts a running centre from its outputs (DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(3)

    def compare(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits - self.center, y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.center = 0.7 * self.center + 0.3 * self.out.mean(0)


class CentredBuffer(Centred):
    """The same in a buffer, which DDP broadcasts from rank 0 before each step."""

    def __init__(self) -> None:
        super().__init__()
        del self.center
        self.register_buffer("center", torch.zeros(3))

    def on_train_batch_end(self, *_: Any) -> None:
        self.center.mul_(0.7).add_(self.out.mean(0), alpha=0.3)


class CentredBufferInStep(CentredBuffer):
    """The same, moved by the step itself, after its loss."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().train_loss(x, y)
        self.center.mul_(0.7).add_(self.out.mean(0), alpha=0.3)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Prototypes(RememberedLogits):
    """Pulls outputs to running means of their classes."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes: dict[int, Tensor] = {}

    def compare(self, logits: Tensor, y: Tensor) -> Tensor:
        zero = torch.zeros(3, dtype=logits.dtype)
        goals = torch.stack([self.prototypes.get(int(label), zero) for label in y])
        return F.cross_entropy(logits, y) + 0.1 * (logits - goals).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for label in self.labels.unique().tolist():
            mean = self.out[self.labels == label].mean(0)
            self.prototypes[label] = self.prototypes.get(label, mean).lerp(mean, 0.3)


class FreeMatch(RememberedLogits):
    """Learns from its own predictions where they are surer than a running mean (FreeMatch)."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold, self.of_classes = torch.tensor(0.5), torch.full((3,), 1 / 3)

    def compare(self, logits: Tensor, y: Tensor) -> Tensor:
        sure, guess = logits.detach().softmax(1).max(1)
        limits = self.of_classes / self.of_classes.max() * self.threshold
        is_sure = (sure >= limits[guess]).to(logits.dtype)
        pseudo = F.cross_entropy(logits, guess, reduction="none") * is_sure
        return F.cross_entropy(logits, y) + pseudo.mean()

    def on_train_batch_end(self, *_: Any) -> None:
        chances = self.out.softmax(1)
        self.threshold = 0.6 * self.threshold + 0.4 * chances.max(1).values.mean()
        self.of_classes = 0.6 * self.of_classes + 0.4 * chances.mean(0)


class Baseline(Classifier):
    """Weights samples by how far their loss is above a running mean of losses."""

    baseline = 1.0

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self(x), y, reduction="none")
        return (losses * (losses.detach() - self.baseline).sigmoid()).mean()

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.baseline = 0.9 * self.baseline + 0.1 * float(outputs["loss"])


class OfLastEpoch(Classifier):
    """Scales a term by the mean loss of the epoch before."""

    scale = 0.1

    def on_train_epoch_start(self) -> None:
        self.losses: list[float] = []

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss.item())
        return loss + self.scale * logits.square().mean()

    def on_train_epoch_end(self) -> None:
        self.scale = 0.1 * sum(self.losses) / len(self.losses)


class DynamicWeights(Classifier):
    """Weights two tasks by how their losses have fallen in the last two epochs (DWA)."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []
        self.sums, self.weights = torch.zeros(2), torch.ones(2)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        losses = torch.stack([F.cross_entropy(logits, y), F.mse_loss(logits, x[:, :3])])
        self.sums = self.sums + losses.detach()
        return (self.weights * losses).sum()

    def on_train_epoch_end(self) -> None:
        self.history.append(self.sums)
        self.sums = torch.zeros(2)
        if len(self.history) > 1:
            self.weights = 2 * (self.history[-1] / self.history[-2]).softmax(0)


class Curriculum(Classifier):
    """Leaves out samples whose loss is above a quantile of the losses of the epoch before."""

    limit = float("inf")

    def on_train_epoch_start(self) -> None:
        self.seen: list[Tensor] = []

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self(x), y, reduction="none")
        self.seen.append(losses.detach())
        return (losses * (losses.detach() <= self.limit)).mean()

    def on_train_epoch_end(self) -> None:
        self.limit = torch.cat(self.seen).quantile(0.4).item()


class WeightsFromValidation(Classifier):
    """Weights classes by how often the validation before has missed them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(3)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(self(x), y, reduction="none") * self.weights[y]).mean()

    def on_validation_epoch_start(self) -> None:
        self.confusion = torch.zeros(3, 3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        for label, guess in zip(y.tolist(), self(x).argmax(1).tolist(), strict=True):
            self.confusion[label, guess] += 1

    def on_validation_epoch_end(self) -> None:
        recall = self.confusion.diagonal() / self.confusion.sum(1).clamp(min=1)
        self.weights = 2 - recall


class FromLoggedStep(Classifier):
    """Scales a term by the loss of the last step, as the trainer has it."""

    scale = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y) + self.scale * logits.square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale = 0.1 * float(self.trainer.callback_metrics["train/loss_step"])
