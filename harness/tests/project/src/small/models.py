"""Networks, and the module that trains them, for the library's tests."""

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
        in_features: numbers per sample; inputs of any shape are flattened.
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

    It normalises over 8 groups of channels (Wu and He, "Group Normalization", ECCV 2018) instead of
    the batch. Training then does not depend on how devices split a batch.

    Args:
        in_channels: channels of the images.
        channels: width of each level; each must be a multiple of 8.
        num_classes: width of the output.
    """

    def __init__(self, in_channels: int, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        levels: list[nn.Module] = []
        for i, width in enumerate(channels):
            levels += [
                nn.Conv2d(in_channels, width, 3, stride=1 if i == 0 else 2, padding=1, bias=False),
                nn.GroupNorm(8, width),
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
        optimizer, scheduler, scheduler_interval, scheduler_monitor, groups: see
            ``harness.build_optimizers``.
        num_classes: classes from 0 to ``num_classes - 1``.
        class_weights: factor of each class in the loss; ``None`` weights all classes equally.
        label_smoothing: fraction of the target probability that is spread over all classes.
    """

    class_weights: Tensor | None

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
    ) -> None:
        super().__init__()
        # Only numbers and lists, so that a checkpoint loads without this code.
        self.save_hyperparameters("num_classes", "class_weights", "label_smoothing")
        self.net, self.label_smoothing = net, label_smoothing
        self.training_plan = optimizer, scheduler, scheduler_interval, scheduler_monitor
        self.groups = groups
        # A buffer moves with the module; a tensor attribute would stay on the CPU.
        weights = None if class_weights is None else torch.tensor(class_weights)
        self.register_buffer("class_weights", weights)
        self.train_loss, self.val_loss, self.test_loss = Mean(), Mean(), Mean()
        self.train_accuracy = Mean()
        self.val_metrics = metrics(num_classes).clone(prefix="val/")
        self.test_metrics = metrics(num_classes).clone(prefix="test/")

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B, ...) to logits (B, num_classes)."""
        logits: Tensor = self.net(x)
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of logits (B, num_classes) and labels (B,)."""
        return F.cross_entropy(
            logits, labels, weight=self.class_weights, label_smoothing=self.label_smoothing
        )

    def weight(self, labels: Tensor) -> Tensor | int:
        """Return the divisor of the mean loss: the number of samples, or the sum of weights."""
        return len(labels) if self.class_weights is None else self.class_weights[labels].sum()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch."""
        inputs, labels = batch
        logits = self(inputs)
        loss, weight = self.loss(logits, labels), self.weight(labels)
        if self.class_weights is not None:
            loss = mean_over(loss, weight)  # a mean over weights, not over samples
        self.train_loss.update(loss.detach(), weight)
        is_right = logits.detach().argmax(dim=1) == labels
        self.train_accuracy.update(is_right.float().mean(), len(labels))
        if is_logged(self, batch_idx):
            # The mean over the samples of all ranks since the last logged step.
            self.log("train/loss", self.train_loss.compute(), prog_bar=True)
            self.train_loss.reset()
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the accuracy over the epoch's training samples."""
        self.log("train/accuracy", self.train_accuracy)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the metrics with one batch, and return its outputs for callbacks."""
        return self._evaluate(batch, "val", self.val_loss, self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the metrics with one batch, and return its outputs for callbacks."""
        return self._evaluate(batch, "test", self.test_loss, self.test_metrics)

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], split: str, loss: Mean, metrics: MetricCollection
    ) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = self(inputs)
        loss.update(self.loss(logits, labels), self.weight(labels))
        metrics.update(logits, labels)
        # The run computes these values over all samples of all ranks.
        values = {f"{split}/loss": loss} | dict(metrics.items())
        self.log_dict(values, on_step=False, on_epoch=True, prog_bar=split == "val")
        return {"inputs": inputs, "labels": labels, "logits": logits}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """Return the columns of a table with one row per sample.

        There is a label column if the batch has labels. Classes are written as names if the facts
        of the data set have ``class_names``.
        """
        inputs, *labels = batch if isinstance(batch, (tuple, list)) else (batch,)
        probabilities = self(inputs).softmax(dim=1)  # (B, num_classes)
        confidence, prediction = probabilities.max(dim=1)
        data = self.trainer.datamodule if self._trainer else None  # type: ignore[attr-defined]
        names = getattr(data, "facts", {}).get("class_names")

        def named(classes: Tensor) -> Any:
            return [names[i] for i in classes.tolist()] if names else classes

        columns: dict[str, Any] = {"label": named(labels[0])} if labels else {}
        columns |= {"prediction": named(prediction), "confidence": confidence}
        for i, column in enumerate(probabilities.unbind(dim=1)):
            columns[f"p_{names[i]}" if names else f"p{i}"] = column
        return columns

    def configure_optimizers(self) -> Any:
        """Build the optimizer and the scheduler that the config sets."""
        return build_optimizers(self, *self.training_plan, groups=self.groups)


def metrics(num_classes: int) -> MetricCollection:
    """Make the metrics of an evaluation: accuracy, and F1 as the mean over classes."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "f1": MulticlassF1Score(num_classes, average="macro"),
        }
    )
