"""Modules that look like another experiment on several devices, but are equal: no warning."""

import random
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.modules.classifiers import Classifier, layers
from tests.modules.data import Flowers


class LogsZero(Classifier):
    """Logs what is 0 but for rounding."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.log("train/excess", (logits.softmax(1).sum(1) - 1).mean())
        self.log("train/centre", (logits - logits.mean(1, keepdim=True)).mean())
        return F.cross_entropy(logits, y)


class LogsCancelled(Classifier):
    """Logs the difference of a loss and the same in another form."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("train/gap", loss - F.nll_loss(logits.log_softmax(1), y))
        return loss


class LogsGradientOfZero(Classifier):
    """Logs a penalty whose weight is still 0, and a mean of residuals that cancel."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.log("train/penalty", 0.0 * logits.std(0).mean())
        chances = logits.softmax(1)
        self.log("train/bias", (chances - chances.mean(1, keepdim=True)).sum(1).mean())
        return F.cross_entropy(logits, y)


class FrozenDropout(Classifier):
    """Dropout in a frozen part, which stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone.eval()

    def forward(self, x: Tensor) -> Any:
        return self.net(self.backbone(x))


class DropoutForLater(Classifier):
    """Has a dropout that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)


class DropoutOfZero(Classifier):
    """Has dropouts that drop nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Any:
        return F.dropout(self.net(x), 0.0, self.training)


class DropoutInTeacher(Classifier):
    """A teacher with dropout, which is kept in evaluation mode by its own ``train``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = layers(nn.Dropout(0.5)).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.teacher.eval()
        return self

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        return F.cross_entropy(logits, y) + F.mse_loss(logits, self.teacher(x))


class NamedDrop(Classifier):
    """Has attributes with "drop" in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.lr_drop, self.drop_rate, self.drop_last = 0.1, 0.5, True

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        return F.cross_entropy(logits, y) + self.lr_drop * logits.square().mean() * self.drop_rate

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, self.lr_drop)]


class DropSchedule(Classifier):
    """Has a schedule by the name of dropout, which weights a term."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout_schedule = [0.3, 0.2, 0.1]
        self.droplet = nn.ParameterDict({"drop": nn.Parameter(torch.zeros(3))})

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x) + self.droplet["drop"]
        weight = self.dropout_schedule[self.current_epoch]
        return F.cross_entropy(logits, y) + weight * logits.square().mean()


class ReplaysLoader(Classifier):
    """Adds the loss of a few fixed samples, read by a loader in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = DataLoader(Flowers(8), batch_size=8)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        old_x, old_y = next(iter(self.memory))
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(old_x), old_y)


class ReplaysAll(ReplaysLoader):
    """Reads all batches of a loader in each step, and makes the loader there."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        for old_x, old_y in DataLoader(self.memory.dataset, batch_size=4):
            loss = loss + 0.5 * F.cross_entropy(self(old_x), old_y)
        return loss


class ComputesMetric(Classifier):
    """Computes metrics in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.mean.update(loss.detach(), weight=len(x))
        self.shown = self.accuracy.compute(), self.mean.compute()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("fit/acc", self.accuracy.compute())
        self.accuracy.reset()
        self.mean.reset()


class CalledMetric(Classifier):
    """Calls a collection of metrics in the step, and logs what it returns."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"acc": torchmetrics.Accuracy("multiclass", num_classes=3)}
        self.metrics = torchmetrics.MetricCollection(dict(kinds), prefix="fit/")

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.metrics(logits, y)
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)


class Clock(Classifier):
    """Logs how long its steps take."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        started = time.perf_counter()
        loss = super().training_step(batch, batch_idx)
        self.log("train/seconds", time.perf_counter() - started)
        self.log("train/now", time.time())
        return loss


class ClockBetween(Classifier):
    """Logs the time between its steps, and the samples in a second."""

    before = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now = time.perf_counter()
        self.log("train/between", now - self.before)
        self.before = now
        return super().training_step(batch, batch_idx)


class LogsInForward(Classifier):
    """Logs in forward."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.net[:2](x)
        if self.training:
            self.log("fit/hidden", hidden.abs().mean(), on_step=False, on_epoch=True)
        return self.net[2](hidden)


class LogsCounters(Classifier):
    """Logs its step, epoch and learning rate."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/step", float(self.global_step))
        self.log("train/epoch", float(self.current_epoch))
        self.log("train/lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class Chunks(Classifier):
    """Computes its batch in chunks."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = zip(x.chunk(2), y.chunk(2), strict=True)
        return sum(F.cross_entropy(self(a), b, reduction="sum") for a, b in pairs) / len(x)


class SampleBySample(Classifier):
    """Computes each sample alone."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = [F.cross_entropy(self(a.unsqueeze(0)), b.unsqueeze(0)) for a, b in zip(x, y)]  # noqa: B905
        return torch.stack(losses).mean()


class ChunksByHand(Classifier):
    """Accumulates gradients of chunks by hand, weighted by their samples."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for a, b in zip(x.split(3), y.split(3), strict=True):
            self.manual_backward(F.cross_entropy(self(a), b) * len(a) / len(x))
        optimizer.step()


class ShowsOne(Classifier):
    """Draws which sample it shows, and trains alike whichever it is."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.shown = x[random.randrange(len(x))]
        return F.cross_entropy(self(x), y)


class FixedNoise(Classifier):
    """Masks measures with a generator of a fixed seed, alike in all steps."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.rand(6, generator=torch.Generator().manual_seed(0)) < 0.7
        return F.cross_entropy(self(x * mask), y)


class DecayInLoss(Classifier):
    """Adds a term that has no samples."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        decay = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(self(x), y) + 0.01 * decay


class GathersToLog(Classifier):
    """Gathers its loss to log it, and waits for the others."""

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        self.losses = self.all_gather(loss.detach())
        if dist.is_initialized():
            dist.barrier()
        return loss


class RunningLoss(Classifier):
    """Keeps a running loss, which it prints."""

    running = 0.0

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.running = 0.9 * self.running + 0.1 * float(outputs["loss"])
        self.print(f"{self.running:.3f}")
