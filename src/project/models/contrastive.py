"""Learn embeddings without labels, and a linear probe that measures their quality."""

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MetricCollection

from harness import build_optimizers
from project.models.classifier import metrics

# Largest changes of a view: degrees; fraction of the image's side; fraction of the image's size.
MAX_ANGLE, MAX_SHIFT, MAX_ZOOM = 15.0, 0.15, 0.2


class Contrastive(pl.LightningModule):
    """Learn embeddings in which two views of an image are close and other images are far.

    The method is SimCLR (Chen et al., ICML 2020), with the network's output as embedding. The
    negatives of an image are all other images of the rank's batch, so their number depends on the
    strategy: the batch is that of the whole node under dp and ddp2, and of one device under ddp.

    A linear probe learns the labels from the embeddings, without a gradient to the network. Its
    accuracy measures the quality of the embeddings.

    Args:
        net: maps images of shape (B, C, H, W) to embeddings of shape (B, num_features).
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        num_features: length of an embedding.
        num_classes: classes of the probe, from 0 to ``num_classes - 1``.
        temperature: divides similarities; the smaller, the more the closest negatives count.
        groups: learning rates of submodules, and weight decay; see ``harness.parameter_groups``.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Optimizer],
        num_features: int,
        num_classes: int = 10,
        temperature: float = 0.2,
        groups: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net", "optimizer", "groups"])
        self.net, self.make_optimizer, self.groups = net, optimizer, groups
        self.probe = nn.Linear(num_features, num_classes)
        self.temperature = temperature
        self.val_metrics = metrics(num_classes).clone(prefix="val/")
        self.test_metrics = metrics(num_classes).clone(prefix="test/")

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to embeddings (B, num_features) of norm 1."""
        return F.normalize(self.net(images), dim=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the contrastive loss of two views of each image plus the probe's loss."""
        images, labels = batch
        views = torch.cat([make_view(images), make_view(images)])  # (2B, C, H, W)
        embeddings = self(views)
        loss = info_nce(embeddings, self.temperature)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/num_negatives", float(len(views) - 2))
        return loss + F.cross_entropy(self.logits(embeddings.detach()), labels.repeat(2))

    def logits(self, embeddings: Tensor) -> Tensor:
        """Return the probe's logits (B, num_classes).

        The division makes the embeddings longer, because the probe learns slowly from norm 1.
        """
        logits: Tensor = self.probe(embeddings / self.temperature)
        return logits

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the metrics with one batch, and return its outputs for callbacks."""
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Update the metrics with one batch, and return its outputs for callbacks."""
        return self._evaluate(batch, self.test_metrics)

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], metrics: MetricCollection
    ) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.logits(self(images))
        metrics.update(logits, labels)
        # The probe's metrics, over all samples of all ranks.
        self.log_dict(dict(metrics.items()), on_step=False, on_epoch=True, prog_bar=True)
        return {"inputs": images, "labels": labels, "logits": logits}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return the columns of a table: the probe's class and the embedding of each sample."""
        images, *labels = batch if isinstance(batch, (tuple, list)) else (batch,)
        embeddings = self(images)
        columns = {"label": labels[0]} if labels else {}
        columns["prediction"] = self.logits(embeddings).argmax(dim=1)
        return columns | {f"e{i}": column for i, column in enumerate(embeddings.unbind(dim=1))}

    def configure_optimizers(self) -> Any:
        """Build the optimizer that the config sets."""
        return build_optimizers(self, self.make_optimizer, groups=self.groups)


def make_view(images: Tensor) -> Tensor:
    """Rotate, scale and shift each image (B, C, H, W) by random amounts."""
    angle, zoom, right, down = torch.rand(4, len(images), device=images.device) * 2 - 1  # (B,)
    angle, zoom = torch.deg2rad(angle * MAX_ANGLE), 1 + zoom * MAX_ZOOM
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    # The grid spans [-1, 1], so a shift by a whole side is 2.
    right, down = 2 * MAX_SHIFT * right, 2 * MAX_SHIFT * down
    rows = [torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def info_nce(embeddings: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of finding an image's other view among all views of the batch.

    Args:
        embeddings: shape (2B, num_features), of norm 1; rows ``i`` and ``B + i`` show one image.
        temperature: divides the similarities.
    """
    similarities = embeddings @ embeddings.T / temperature  # (2B, 2B)
    positions = torch.arange(len(embeddings), device=embeddings.device)
    similarities[positions, positions] = -torch.inf  # a view is not compared with itself
    return F.cross_entropy(similarities, positions.roll(len(embeddings) // 2))
