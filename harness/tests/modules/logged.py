"""What is validated in other ways than by a mean over steps, as researchers write it."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.modules.classifiers import Classifier


def auc(scores: Tensor, positive: Tensor) -> Tensor:
    """How often a positive sample has a higher score than another."""
    higher = scores[positive].unsqueeze(1) > scores[~positive].unsqueeze(0)
    return higher.double().mean()


class TwoValidations(Classifier):
    """Two validation loaders, each with a name of its own for what it logs."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y))


class OneKey(Classifier):
    """Two validation loaders that log into one key."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y), add_dataloader_idx=False)


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
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        self.log("val/auc", auc(scores, labels == 0))
        self.log("val/next", (scores[1:] * scores[:-1]).mean())  # depends on the order
        self.log("val/samples", float(len(scores)))
        self.scores.clear()
        self.labels.clear()


class Counters(Classifier):
    """Counts by hand."""

    def on_validation_epoch_start(self) -> None:
        self.correct, self.total, self.sum = 0, 0, 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.correct += int((logits.argmax(1) == y).sum())
        self.total += len(y)
        self.sum += F.cross_entropy(logits, y, reduction="sum").item()

    def on_validation_epoch_end(self) -> None:
        self.log("val/acc", self.correct / self.total)
        self.log("val/loss", self.sum / self.total)


class CountersOfTensors(Classifier):
    """Counts by hand, in tensors; the sums are logged with sync_dist by an author who knows."""

    def on_validation_epoch_start(self) -> None:
        self.correct = torch.zeros((), device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.correct += (logits.argmax(1) == y).sum()
        self.log("val/loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self) -> None:
        self.log("val/correct", self.correct, sync_dist=True, reduce_fx="sum")


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


class Gathered(Collected):
    """Gathers its lists itself, with Lightning's own method."""

    def on_validation_epoch_end(self) -> None:
        scores = self.all_gather(torch.cat(self.scores)).flatten()
        labels = self.all_gather(torch.cat(self.labels)).flatten()
        self.log("val/auc", auc(scores, labels == 0))
        self.scores.clear()
        self.labels.clear()


class GatheredObjects(Collected):
    """Gathers its lists itself, where there are several processes."""

    def on_validation_epoch_end(self) -> None:
        mine = torch.cat(self.scores), torch.cat(self.labels)
        parts = [mine]
        if dist.is_available() and dist.is_initialized():
            parts = [mine] * dist.get_world_size()
            dist.all_gather_object(parts, mine)
        scores, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        self.log("val/auc", auc(scores, labels == 0))
        self.scores.clear()
        self.labels.clear()


class ReducedCounters(Counters):
    """The same by ``torch.distributed``."""

    def on_validation_epoch_end(self) -> None:
        counts = torch.tensor([self.correct, self.sum, self.total], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(counts)
        self.log("val/acc", counts[0] / counts[2])
        self.log("val/loss", counts[1] / counts[2])


class GatheredSteps(Classifier):
    """Gathers in each validation step what it is to log."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.all_gather(self(x)).flatten(0, -2)
        y = self.all_gather(y).flatten()
        self.log("val/loss", F.cross_entropy(logits, y))
        self.log("val/spread", logits.std(0).mean())


class GrowingTensor(Classifier):
    """Keeps outputs in a tensor that grows."""

    def on_validation_epoch_start(self) -> None:
        self.scores = torch.zeros(0, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.scores = torch.cat([self.scores, logits[:, 0]])
        self.log("val/loss", F.cross_entropy(logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("val/median", self.scores.median())
