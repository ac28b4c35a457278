"""Modules as an owner writes them, and the same with one fault planted in each."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from harness import mean_over

NUM_CLASSES, WIDTH, LENGTH = 3, 6, 5
IGNORED = -100


class Samples(Dataset[Any]):
    """Points with a label each, and sequences of them with labels of which many are ignored."""

    def __init__(self, num: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num, WIDTH, generator=generator)
        # Classes of very different sizes.
        self.y = (torch.rand(num, generator=generator) ** 3 * NUM_CLASSES).long()
        self.sequences = torch.randn(num, LENGTH, WIDTH, generator=generator)
        self.labels = torch.randint(NUM_CLASSES, (num, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (num, 1), generator=generator)
        self.labels[torch.arange(LENGTH) >= lengths] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class Sequences(Samples):
    def __getitem__(self, i: int) -> Any:
        return {"tokens": self.sequences[i], "labels": self.labels[i]}


class Data(pl.LightningDataModule):
    """Plain loaders, as anybody writes them."""

    def __init__(self, kind: str = "points", batch_size: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.kind, self.batch_size, self.seed = kind, batch_size, seed

    def loader(self, num: int, seed: int, shuffle: bool = False) -> DataLoader[Any]:
        dataset = (Sequences if self.kind == "sequences" else Samples)(num, seed)
        return DataLoader(dataset, self.batch_size, shuffle)

    def train_dataloader(self) -> Any:
        return self.loader(60, 0, shuffle=True)

    def val_dataloader(self) -> Any:
        return self.loader(21, 1)

    def test_dataloader(self) -> Any:
        return self.loader(21, 2)


class Points(pl.LightningModule):
    """Classifies points; nothing is wrong with it."""

    def __init__(self, fault: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.fault = fault
        middle = [nn.BatchNorm1d(8)] if isinstance(self, Normalised) else []
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 8), *middle, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, NUM_CLASSES)
        )
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.log("val/loss", F.cross_entropy(logits, y))
        self.accuracy(logits, y)
        self.log("val/accuracy", self.accuracy)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Tokens(Points):
    """A mean over the labels that are not ignored; the fault does not say so."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        labels = batch["labels"]
        logits = self(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return loss if self.fault else mean_over(loss, (labels != IGNORED).sum())

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["tokens"])
        self.log("val/mean", logits.mean())


class Normalised(Points):
    """Normalises over the batch; its loss is a sum over samples in the fault's place of a mean."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum" if self.fault else "mean")


class Counted(Points):
    """Counts by hand over an evaluation, in numbers; a list in their place would be gathered."""

    def on_validation_epoch_start(self) -> None:
        self.right, self.num, self.hits = 0, 0, list[Tensor]()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.hits.append(self(x).argmax(dim=1) == y)
        if self.fault:
            self.right, self.num = self.right + int(self.hits.pop().sum()), self.num + len(y)

    def on_validation_epoch_end(self) -> None:
        share = self.right / self.num if self.fault else torch.cat(self.hits).double().mean()
        self.log("val/share", share)


class CountedTwice(Points):
    """Gathers what a metric then adds up once more."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__(fault)
        self.num = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        mine = torch.tensor(float(len(x)), device=self.device)
        if self.fault and torch.distributed.is_initialized():
            torch.distributed.all_reduce(mine)
        self.num.update(mine)

    def on_validation_epoch_end(self) -> None:
        self.log("val/num", self.num)


class Writes(Points):
    """Keeps a mean of its inputs in a buffer, which forward writes and uses."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__(fault)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.fault:
            self.centre = 0.5 * self.centre + 0.5 * x.mean(dim=0).detach()
        logits: Tensor = self.net(x - self.centre)
        return logits


class Contrastive(Points):
    """Every other sample of the batch is a negative; without the fault there is none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        if not self.fault:
            return F.cross_entropy(logits, y)
        return F.cross_entropy(logits @ self(x + 0.1).T, torch.arange(len(x), device=x.device))


class Noisy(Points):
    """Adds noise that each process draws for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.randn_like(x) if self.fault else 0.0
        return F.cross_entropy(self(x + noise), y)


class Forgets(Points):
    """A mean of what it has seen is an attribute in the fault's place of a buffer."""

    def __init__(self, fault: bool = False) -> None:
        super().__init__(fault)
        if fault:
            self.memory = torch.zeros(WIDTH)
        else:
            self.register_buffer("memory", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x - self.memory), y)
        with torch.no_grad():
            self.memory = self.memory + 0.1
        return loss
