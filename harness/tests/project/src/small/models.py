"""Networks, and the module that trains them: what the library's tests need of a project."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from harness import Mean, build_optimizers, is_logged, mean_over


class MLP(nn.Module):
    """A fully connected network.

    Args:
        in_features: numbers per sample; inputs of any shape are flattened to it.
        hidden: widths of the hidden layers.
        num_classes: width of the output.
        dropout: probability that a hidden activation is zeroed in training.
    """

    def __init__(
        self, in_features: int, hidden: Sequence[int], num_classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for width in hidden:
            layers += [nn.Linear(in_features, width), nn.GELU()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_features = width
        self.layers = nn.Sequential(*layers, nn.Linear(in_features, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to logits of shape (B, num_classes)."""
        logits: Tensor = self.layers(x)
        return logits


class CNN(nn.Module):
    """A small convolutional network: 3x3 convolutions, each level at half the resolution.

    It normalises over groups of channels, not over the batch, so that its training does not
    depend on how a batch is split between devices.

    Args:
        in_channels: channels of the images.
        channels: width of each level; each must be a multiple of ``num_groups``.
        num_classes: width of the output.
        num_groups: groups of channels that are normalised together (Wu and He, "Group
            Normalization", ECCV 2018).
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        num_classes: int,
        num_groups: int = 8,
    ) -> None:
        super().__init__()
        levels: list[nn.Module] = []
        for i, width in enumerate(channels):
            levels += [
                nn.Conv2d(in_channels, width, 3, stride=1 if i == 0 else 2, padding=1, bias=False),
                nn.GroupNorm(num_groups, width),
                nn.GELU(),
            ]
            in_channels = width
        self.levels = nn.Sequential(*levels)
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images of shape (B, C, H, W) to logits of shape (B, num_classes)."""
        features = self.levels(x).mean(dim=(2, 3))  # (B, channels[-1])
        logits: Tensor = self.head(features)
        return logits


class Classifier(pl.LightningModule):
    """Train any network that maps a batch to logits, with cross-entropy.

    Args:
        net: maps inputs of shape (B, ...) to logits of shape (B, num_classes).
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        scheduler: called with the optimizer; see ``build_optimizers``.
        scheduler_interval: whether the scheduler advances after each step or each epoch.
        scheduler_monitor: the logged value that ``ReduceLROnPlateau`` looks at.
        groups: learning rates of parts, and weight decay; see ``harness.parameter_groups``.
        num_classes: classes from 0 to ``num_classes - 1``.
        class_weights: factor of each class in the loss; ``None`` counts all the same.
        label_smoothing: share of the target spread over all classes.
        ignore_index: the label of samples without one, which count nowhere.
    """

    class_weights: Tensor | None
    class_names: list[str] | None = None  # in predictions

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., Any] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        scheduler_monitor: str = "val/loss",
        groups: Mapping[str, Any] | None = None,
        num_classes: int = 10,
        class_weights: Sequence[float] | None = None,
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if class_weights is not None and len(class_weights) != num_classes:
            raise ValueError(f"class_weights has {len(class_weights)} numbers, not {num_classes}.")
        # Only plain values: a checkpoint must load where this code does not exist.
        self.save_hyperparameters("num_classes", "class_weights", "label_smoothing", "ignore_index")
        self.net = net
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.schedule = {"interval": scheduler_interval, "monitor": scheduler_monitor}
        self.groups = groups
        self.label_smoothing, self.ignore_index = label_smoothing, ignore_index
        # A buffer moves with the module; a plain tensor would stay on the CPU.
        weights = None if class_weights is None else torch.tensor(class_weights)
        self.register_buffer("class_weights", weights)

        self.train_loss, self.train_accuracy = Mean(), Mean()
        self.val_metrics = metrics(num_classes).clone(prefix="val/")
        self.test_metrics = metrics(num_classes).clone(prefix="test/")
        self.val_loss, self.test_loss = Mean(), Mean()

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B, ...) to logits (B, num_classes)."""
        logits: Tensor = self.net(x)
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of logits (B, num_classes) and labels (B,)."""
        return F.cross_entropy(
            logits, labels, weight=self.class_weights, label_smoothing=self.label_smoothing
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch."""
        inputs, labels = batch
        logits = self(inputs)
        if self.ignore_index is not None:
            has_label = labels != self.ignore_index
            logits, labels = logits[has_label], labels[has_label]
        loss, weight = self.loss(logits, labels), self._weight(labels)
        if self.class_weights is not None or self.ignore_index is not None:
            loss = mean_over(loss, weight)  # not over the samples
        if len(labels):
            self.train_loss.update(loss.detach(), weight)
            is_right = logits.detach().argmax(dim=1) == labels
            self.train_accuracy.update(is_right.float().mean(), len(labels))
        if is_logged(self, batch_idx):
            # The mean since the last time, over the samples of all processes.
            self.log("train/loss", self.train_loss.compute(), prog_bar=True)
            self.train_loss.reset()
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the accuracy over the epoch's training samples."""
        self.log("train/accuracy", self.train_accuracy)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Count one batch; the outputs are for callbacks."""
        return self._evaluate(batch, self.val_metrics, self.val_loss)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics over all validation samples of all processes."""
        self.log("val/loss", self.val_loss, prog_bar=True)
        for name, metric in self.val_metrics.items():
            self.log(name, metric, prog_bar=name == "val/accuracy")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Count one batch; the outputs are for callbacks."""
        return self._evaluate(batch, self.test_metrics, self.test_loss)

    def on_test_epoch_end(self) -> None:
        """Log the metrics over all test samples of all processes."""
        self.log("test/loss", self.test_loss)
        for name, metric in self.test_metrics.items():
            self.log(name, metric)

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], metrics: MetricCollection, mean_loss: Mean
    ) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = self(inputs)
        if self.ignore_index is not None:
            has_label = labels != self.ignore_index
            inputs, logits, labels = inputs[has_label], logits[has_label], labels[has_label]
        if len(labels):
            metrics.update(logits, labels)
            mean_loss.update(self.loss(logits, labels), self._weight(labels))
        return {"inputs": inputs, "labels": labels, "logits": logits}

    def _weight(self, labels: Tensor) -> Tensor | int:
        """What a batch's loss is a mean over: the number of samples, or the sum of weights."""
        return len(labels) if self.class_weights is None else self.class_weights[labels].sum()

    def on_predict_start(self) -> None:
        """Take the names of the classes from the data."""
        facts = getattr(self.trainer.datamodule, "facts", {})  # type: ignore[attr-defined]
        self.class_names = facts.get("class_names")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return columns of a table with one row per sample; new data has no labels.

        Classes have their names where the data knows them, as those of folders.
        """
        inputs, *labels = batch if isinstance(batch, (tuple, list)) else (batch,)
        probabilities = self(inputs).softmax(dim=1)  # (B, num_classes)
        confidence, prediction = probabilities.max(dim=1)
        names = self.class_names

        def named(classes: Tensor) -> Any:
            return classes if names is None else [names[i] for i in classes.tolist()]

        columns: dict[str, Any] = {"label": named(labels[0])} if labels else {}
        columns |= {"prediction": named(prediction), "confidence": confidence}
        each = enumerate(probabilities.unbind(dim=1))
        return columns | {f"p_{names[i]}" if names else f"p{i}": column for i, column in each}

    def configure_optimizers(self) -> Any:
        """Build the optimizer and the scheduler from what the configuration gave."""
        return build_optimizers(
            self, self.make_optimizer, self.make_scheduler, groups=self.groups, **self.schedule
        )


def metrics(num_classes: int) -> MetricCollection:
    """The scores of an evaluation."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "f1": MulticlassF1Score(num_classes, average="macro"),
        }
    )
