"""Train regressors: the network learns standardised targets, and predicts in their units."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from harness import build_optimizers


class Regressor(pl.LightningModule):
    """Train any network that maps a batch to numbers.

    If the facts of the data set have ``target_mean`` and ``target_std``, the network learns targets
    of mean 0 and standard deviation 1. Metrics and predictions have the targets' units.

    Args:
        net: maps inputs of shape (B, ...) to numbers, in the shape of the targets or (B, 1).
        loss: called with the network's numbers and scaled targets, such as ``nn.HuberLoss()``.
        optimizer, scheduler, scheduler_interval, scheduler_monitor, groups: see
            ``harness.build_optimizers``.
    """

    target_mean: Tensor
    target_std: Tensor

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., Any] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        scheduler_monitor: str = "val/loss",
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.training_plan = optimizer, scheduler, scheduler_interval, scheduler_monitor
        self.groups = groups
        # Buffers are saved in checkpoints, so that predictions need no training data.
        self.register_buffer("target_mean", torch.tensor(0.0))
        self.register_buffer("target_std", torch.tensor(1.0))
        metrics = MetricCollection({"mse": MeanSquaredError(), "mae": MeanAbsoluteError()})
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def on_fit_start(self) -> None:
        """Read mean and standard deviation of the targets from the facts of the data set."""
        facts = getattr(self.trainer.datamodule, "facts", {})  # type: ignore[attr-defined]
        self.target_mean.fill_(facts.get("target_mean", 0.0))
        self.target_std.fill_(facts.get("target_std", 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (B, ...) to scaled numbers, (B,) or (B, num_outputs)."""
        numbers: Tensor = self.net(x)
        return numbers.squeeze(1) if numbers.ndim == 2 and numbers.shape[1] == 1 else numbers

    def in_units(self, numbers: Tensor) -> Tensor:
        """Return the network's numbers in the targets' units."""
        return numbers * self.target_std + self.target_mean

    def exported(self, x: Tensor) -> Tensor:
        """Return predictions in the targets' units; scripts/export.py exports this method."""
        return self.in_units(self(x))

    def scaled_loss(self, numbers: Tensor, targets: Tensor) -> Tensor:
        """Return the loss between the network's numbers and targets in their own units."""
        scaled = (targets - self.target_mean) / self.target_std
        loss: Tensor = self.loss(numbers, scaled.view_as(numbers))
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of the batch."""
        inputs, targets = batch
        loss = self.scaled_loss(self(inputs), targets)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the metrics with one batch, and return its outputs for callbacks."""
        return self._evaluate(batch, "val", self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the metrics with one batch, and return its outputs for callbacks."""
        return self._evaluate(batch, "test", self.test_metrics)

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], split: str, metrics: MetricCollection
    ) -> dict[str, Tensor]:
        inputs, targets = batch
        numbers = self(inputs)
        predictions = self.in_units(numbers)
        metrics.update(predictions, targets.view_as(predictions))
        self.log(f"{split}/loss", self.scaled_loss(numbers, targets), batch_size=len(targets))
        self.log_dict(dict(metrics.items()), on_step=False, on_epoch=True, prog_bar=True)
        return {"inputs": inputs, "targets": targets, "predictions": predictions}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the columns of a table: the target, if the batch has one, and the prediction."""
        inputs, *targets = batch if isinstance(batch, (tuple, list)) else (batch,)
        columns = {"target": targets[0]} if targets else {}
        return columns | {"prediction": self.in_units(self(inputs))}

    def configure_optimizers(self) -> Any:
        """Build the optimizer and the scheduler that the config sets."""
        return build_optimizers(self, *self.training_plan, groups=self.groups)
