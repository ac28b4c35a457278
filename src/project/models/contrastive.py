"""Training of embeddings without labels, and a probe that says what they are worth."""

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

MAX_ANGLE, MAX_SHIFT, MAX_ZOOM = 15.0, 0.15, 0.2  # of views: degrees, shares of the side, shares


class Contrastive(pl.LightningModule):
    """Learn embeddings without labels: two views of an image are close, all other images far.

    The loss looks at the whole batch of the process, so that the strategy decides how many
    negatives an image meets: all of the node's batch under dp and ddp2, a device's share of it
    under ddp. SimCLR's recipe (Chen et al., ICML 2020) with the network's output as embedding.

    A linear probe learns the labels from the embeddings beside it, without a gradient to the
    network: its accuracy says what the embeddings are worth.

    Args:
        net: maps images of shape (B, C, H, W) to embeddings of shape (B, num_features).
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        num_features: length of an embedding.
        num_classes: classes that the probe tells apart.
        temperature: how much the closest negatives count more than the others.
        groups: learning rates of parts, and weight decay; see ``harness.parameter_groups``.
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
        """Map images (B, C, H, W) to embeddings of length 1, (B, num_features)."""
        return F.normalize(self.net(images), dim=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of two views of each image, and of the probe."""
        images, labels = batch
        views = torch.cat([make_view(images), make_view(images)])  # (2B, C, H, W)
        embeddings = self(views)
        loss = info_nce(embeddings, self.temperature)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/num_negatives", float(len(views) - 2))
        return loss + F.cross_entropy(self.logits(embeddings.detach()), labels.repeat(2))

    def logits(self, embeddings: Tensor) -> Tensor:
        """Return the probe's answer, (B, num_classes); short embeddings make for slow learning."""
        logits: Tensor = self.probe(embeddings / self.temperature)
        return logits

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Count one batch; the outputs are for callbacks."""
        return self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Count one batch; the outputs are for callbacks."""
        return self._evaluate(batch, self.test_metrics)

    def _evaluate(
        self, batch: tuple[Tensor, Tensor], metrics: MetricCollection
    ) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.logits(self(images))
        metrics.update(logits, labels)
        # The probe's scores over all samples of all processes.
        self.log_dict(dict(metrics.items()), on_step=False, on_epoch=True, prog_bar=True)
        return {"inputs": images, "labels": labels, "logits": logits}

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Return columns of a table with one row per sample: the probe's answer, the embedding."""
        images, *labels = batch if isinstance(batch, (tuple, list)) else (batch,)
        embeddings = self(images)
        columns = {"label": labels[0]} if labels else {}
        columns["prediction"] = self.logits(embeddings).argmax(dim=1)
        return columns | {f"e{i}": column for i, column in enumerate(embeddings.unbind(dim=1))}

    def configure_optimizers(self) -> Any:
        """Build the optimizer from what the configuration gave."""
        return build_optimizers(self, self.make_optimizer, groups=self.groups)


def make_view(images: Tensor) -> Tensor:
    """Turn, scale and move each image (B, C, H, W) by an amount of its own."""
    angle, zoom, right, down = torch.rand(4, len(images), device=images.device) * 2 - 1  # (B,)
    angle, zoom = torch.deg2rad(angle * MAX_ANGLE), 1 + zoom * MAX_ZOOM
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    # The grid spans [-1, 1]: a shift by the whole side is 2.
    right, down = 2 * MAX_SHIFT * right, 2 * MAX_SHIFT * down
    rows = [torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def info_nce(embeddings: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of finding an image's other view among all views of the batch.

    Args:
        embeddings: of length 1, (2B, num_features); rows ``i`` and ``B + i`` show one image.
        temperature: divides the similarities.
    """
    similarities = embeddings @ embeddings.T / temperature  # (2B, 2B)
    positions = torch.arange(len(embeddings), device=embeddings.device)
    similarities[positions, positions] = -torch.inf  # a view is no negative of itself
    return F.cross_entropy(similarities, positions.roll(len(embeddings) // 2))
