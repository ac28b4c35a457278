"""Validations other than a mean over steps, as researchers write them."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """The fraction of pairs in which a sample of class 0 has the larger output."""
    higher = scores[labels == 0].unsqueeze(1) > scores[labels != 0].unsqueeze(0)
    return higher.double().mean()


class TwoValidations(Classifier):
    """Two validation loaders, each with a name of its own for what it logs."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y))


class Collected(Classifier):
    """Keeps outputs in lists, and logs what is computed from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[Tensor] = []
        self.labels: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.scores.append(logits[:, 0])
        self.labels.append(y)
        self.log("val/loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self) -> None:
        scores, labels = self.whole(torch.cat(self.scores), torch.cat(self.labels))
        self.log("val/auc", auc(scores, labels))
        self.log("val/next", (scores[1:] * scores[:-1]).mean())  # depends on the order
        self.log("val/samples", float(len(scores)))
        self.scores.clear()
        self.labels.clear()

    def whole(self, scores: Tensor, labels: Tensor) -> Any:
        return scores, labels


class Gathered(Collected):
    """Gathers its lists itself, with Lightning's own method."""

    def whole(self, scores: Tensor, labels: Tensor) -> Any:
        return self.all_gather(scores).flatten(), self.all_gather(labels).flatten()


class GatheredObjects(Collected):
    """Gathers its lists itself, where there are several processes."""

    def whole(self, scores: Tensor, labels: Tensor) -> Any:
        parts = [(scores, labels)]
        if dist.is_initialized():
            parts *= dist.get_world_size()
            dist.all_gather_object(parts, (scores, labels))
        return (torch.cat(part) for part in zip(*parts, strict=True))


class Counters(Classifier):
    """Counts by hand; a user who knows of ranks adds up their counts."""

    def __init__(self, adds: str = "") -> None:
        super().__init__()
        self.adds = adds

    def on_validation_epoch_start(self) -> None:
        self.correct, self.total, self.sum = 0, 0, 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.correct += int((logits.argmax(1) == y).sum())
        self.total += len(y)
        self.sum += F.cross_entropy(logits, y, reduction="sum").item()

    def on_validation_epoch_end(self) -> None:
        counts = torch.tensor([self.correct, self.sum, self.total], dtype=torch.float64)
        if self.adds == "sync_dist":
            self.log("val/loss", counts[1], sync_dist=True, reduce_fx="sum")
            return
        if self.adds == "all_reduce" and dist.is_initialized():
            dist.all_reduce(counts)
        self.log("val/acc", counts[0] / counts[2])
        self.log("val/loss", counts[1] / counts[2])


class Reductions(Classifier):
    """Logs sums and extremes of steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        self.log("val/loss", losses.mean())
        self.log("val/worst", losses.max(), reduce_fx="max")
        self.log("val/best", losses.min(), reduce_fx=torch.min)
        self.log("val/sum", losses.sum(), reduce_fx="sum")
        self.log("val/worst_synced", losses.max(), reduce_fx=max, sync_dist=True)
        self.log("val/sum_synced", losses.sum(), reduce_fx=torch.sum, sync_dist=True)


class GatheredSteps(Classifier):
    """Gathers in each validation step what it is to log."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.all_gather(self(x)).flatten(0, -2)
        y = self.all_gather(y).flatten()
        self.log("val/loss", F.cross_entropy(logits, y))
        self.log("val/spread", logits.std(0).mean())
