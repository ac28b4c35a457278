"""Classifiers of measures, as researchers write them: they know nothing of this project."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val/acc", (logits.argmax(1) == y).double().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class ClassWeights(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 9.0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self(x), y)


class SumOfLosses(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.03)


class BatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class Dropout(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


class FrozenBackbone(Classifier):
    """Fine-tunes a head on features that stay, statistics included."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.backbone.requires_grad_(False)
        self.net = nn.Linear(8, 3)

    def on_train_epoch_start(self) -> None:
        self.backbone.eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.backbone(x)
        return self.net(features)


class UnusedParameters(Classifier):
    """Has a head for later."""

    def __init__(self) -> None:
        super().__init__()
        self.later = nn.Linear(8, 2)


class Schedule(Classifier):
    """Warms up by steps; conf says gradient_clip_val."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Plateau(Classifier):
    """Lowers its rate where the validation does not improve."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val/loss"}


class Metrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.Accuracy("multiclass", num_classes=3),
                "f1": torchmetrics.F1Score("multiclass", num_classes=3, average="macro"),
            }
        )
        self.train_metrics = metrics.clone(prefix="fit/")
        self.val_metrics = metrics.clone(prefix="val/")
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)  # keeps all samples
        self.spearman = torchmetrics.SpearmanCorrCoef()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.train_metrics(logits, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_metrics.update(logits, y)
        self.auroc(logits, y)
        self.spearman.update(logits[:, 0], y.double())
        self.log("val/auroc", self.auroc, on_epoch=True)
        self.log("val/loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.log("val/spearman", self.spearman.compute())
        self.val_metrics.reset()
        self.spearman.reset()


class LossInForward(Classifier):
    """The network computes its loss, as many of timm and Hugging Face do."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self(*batch))


class Outputs(NamedTuple):
    logits: Tensor
    features: Tensor


class NamedTuples(Classifier):
    def forward(self, x: Tensor) -> Any:
        features = self.net[:2](x)
        return Outputs(self.net[2](features), features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        return F.cross_entropy(outputs.logits, batch[1]) + 0.01 * outputs.features.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0])
        self.log("val/loss", F.cross_entropy(outputs.logits, batch[1]))
        self.log("val/size", outputs.features.norm(dim=1).mean())


@dataclass
class Result:
    logits: Tensor
    features: Tensor


class Dataclasses(NamedTuples):
    def forward(self, x: Tensor) -> Any:
        return Result(**super().forward(x)._asdict())


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """What Hugging Face's networks return, in few lines."""

    __getattr__ = OrderedDict.__getitem__


class LossInOutputs(NamedTuples):
    """As a network of Hugging Face with labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        outputs = super().forward(x)
        loss = F.cross_entropy(outputs.logits, labels)
        return ModelOutput(loss=loss, logits=outputs.logits)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0], labels=batch[1]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self(batch[0], labels=batch[1])
        self.log("val/loss", outputs.loss)
        self.log("val/acc", (outputs.logits.argmax(1) == batch[1]).double().mean())


class Compiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="aot_eager", dynamic=True)


class Checkpointed(Classifier):
    """Forgets the activations of a part, which is called once or twice."""

    def __init__(self, use_reentrant: bool, num_calls: int = 1) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.use_reentrant, self.num_calls = use_reentrant, num_calls

    def forward(self, x: Tensor) -> Tensor:
        features = self.net[:2](x)
        for _ in range(self.num_calls):
            features = checkpoint(self.part, features, use_reentrant=self.use_reentrant)
        return self.net[2](features)
