"""Classifiers of measures, as researchers write them: they know nothing of this project.

Most kinds of this package are a ``Classifier`` with another loss, network, step or optimizer.
"""

from collections import OrderedDict, namedtuple
from dataclasses import make_dataclass
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class OneLoss(pl.LightningModule):
    """Trains and evaluates ``loss``, which subclasses write."""

    rate = 0.3

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def layers(*parts: nn.Module, num_outputs: int = 3) -> nn.Sequential:
    """A network of measures, with parts behind its first layer."""
    return nn.Sequential(nn.Linear(6, 8), *parts, nn.Tanh(), nn.Linear(8, num_outputs))


class Classifier(OneLoss):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of training steps, which many kinds write in another way."""
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.train_loss(*batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val/acc", (logits.argmax(1) == y).double().mean(), prog_bar=True)


class BatchNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.BatchNorm1d(8))


class Dropout(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = layers(nn.Dropout(0.2))


class FrozenBackbone(BatchNorm):
    """Fine-tunes a head on features that stay, statistics included."""

    def on_train_epoch_start(self) -> None:
        self.net[:3].requires_grad_(False).eval()


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
        f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
        self.train_f1, self.val_f1 = f1, f1.clone()
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=3)  # keeps all samples
        self.spearman = torchmetrics.SpearmanCorrCoef()

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.train_f1(logits, y)
        self.log("fit/f1", self.train_f1, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_f1.update(logits, y)
        self.auroc(logits, y)
        self.spearman.update(logits[:, 0], y.double())
        self.log("val/auroc", self.auroc, on_epoch=True)
        self.log("val/loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"val/f1": self.val_f1.compute(), "val/spearman": self.spearman.compute()})
        self.val_f1.reset()
        self.spearman.reset()


class LossInForward(OneLoss):
    """The network computes its loss, as many of timm and Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.net(x), y)

    def loss(self, batch: Any) -> Tensor:
        return self(*batch)


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """What Hugging Face's networks return, in few lines."""

    __getattr__ = OrderedDict.__getitem__


class LossInOutputs(LossInForward):
    """As a network of Hugging Face with labels."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.net(x)
        return ModelOutput(loss=F.cross_entropy(logits, labels), logits=logits)

    def loss(self, batch: Any) -> Tensor:
        outputs = self(batch[0], labels=batch[1])
        return outputs.loss + 0.01 * outputs.logits.square().mean()


class NamedTuples(Classifier):
    """Returns two tensors of each sample in an object with names."""

    container: Any = namedtuple("Outputs", "logits features")

    def forward(self, x: Tensor) -> Any:
        features = self.net[:2](x)
        return self.container(self.net[2](features), features)

    def train_loss(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = self(x)
        return F.cross_entropy(outputs.logits, y) + 0.01 * outputs.features.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.train_loss(*batch))


class Dataclasses(NamedTuples):
    container = make_dataclass("Result", ["logits", "features"])


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
