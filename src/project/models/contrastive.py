from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric


class Contrastive(pl.LightningModule):
    """Learn embeddings without labels: two views of an image are close, all other images far.

    The loss looks at the whole batch of the process, so that the strategy decides how many
    negatives an image meets: all of the node's batch under dp and ddp2, a device's share of it
    under ddp. SimCLR's recipe (Chen et al., ICML 2020) with the network's output as embedding.

    Args:
        net: maps images of shape (B, C, H, W) to embeddings of shape (B, D).
        optimizer: called with the parameters, for example ``partial(AdamW, lr=1e-3)``.
        temperature: how much the closest negatives count more than the others.
        max_angle: views are turned by up to this many degrees each way.
        max_shift: views are moved by up to this share of the image's side each way.
        max_zoom: views are scaled by up to this share each way.
        num_neighbors: images that vote on the label of one in an evaluation.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., Optimizer],
        temperature: float = 0.2,
        max_angle: float = 15.0,
        max_shift: float = 0.15,
        max_zoom: float = 0.2,
        num_neighbors: int = 5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("temperature", "max_angle", "max_shift", "max_zoom")
        self.net, self.make_optimizer = net, optimizer
        self.temperature = temperature
        self.max_angle, self.max_shift, self.max_zoom = max_angle, max_shift, max_zoom
        self.val_accuracy = NearestNeighborAccuracy(num_neighbors)
        self.test_accuracy = NearestNeighborAccuracy(num_neighbors)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to embeddings of length 1, (B, D)."""
        return F.normalize(self.net(images), dim=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of two views of each image; the labels are not used."""
        images, _ = batch
        views = torch.cat([self.view(images), self.view(images)])  # (2B, C, H, W)
        loss = info_nce(self(views), self.temperature)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log("train/num_negatives", float(len(views) - 2))
        return loss

    def view(self, images: Tensor) -> Tensor:
        """Turn, scale and move each image (B, C, H, W) by an amount of its own."""
        angle, zoom, right, down = torch.rand(4, len(images), device=self.device) * 2 - 1  # (B,)
        angle, zoom = torch.deg2rad(angle * self.max_angle), 1 + zoom * self.max_zoom
        cos, sin = zoom * angle.cos(), zoom * angle.sin()
        # The grid spans [-1, 1]: a shift by the whole side is 2.
        right, down = 2 * self.max_shift * right, 2 * self.max_shift * down
        rows = [torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)]
        grid = F.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, align_corners=False)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Collect the embeddings of one batch."""
        self.val_accuracy.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        """Log how well neighbours predict labels, over all samples of all processes."""
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Collect the embeddings of one batch."""
        self.test_accuracy.update(self(batch[0]), batch[1])

    def on_test_epoch_end(self) -> None:
        """Log how well neighbours predict labels, over all samples of all processes."""
        self.log("test/accuracy", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the embeddings as columns of a table with one row per sample."""
        columns = self(batch[0]).unbind(dim=1)
        return {"label": batch[1], **{f"e{i}": column for i, column in enumerate(columns)}}

    def configure_optimizers(self) -> Optimizer:
        """Build the optimizer from what the configuration gave."""
        return self.make_optimizer(self.parameters())


def info_nce(embeddings: Tensor, temperature: float) -> Tensor:
    """Mean cross-entropy of finding an image's other view among all views of the batch.

    Args:
        embeddings: of length 1; row ``i`` and row ``B + i`` are views of one image, (2B, D).
        temperature: divides the similarities.
    """
    similarities = embeddings @ embeddings.T / temperature  # (2B, 2B)
    similarities = similarities.masked_fill(
        torch.eye(len(embeddings), device=embeddings.device) > 0, -torch.inf
    )
    half = len(embeddings) // 2
    other_view = torch.arange(len(embeddings), device=embeddings.device).roll(half)
    return F.cross_entropy(similarities, other_view)


class NearestNeighborAccuracy(Metric):
    """Share of samples whose nearest neighbours among all the others vote for their label.

    It says what an embedding is worth without training a classifier on it. States are
    concatenated over processes, so that neighbours are looked for among all samples.

    Args:
        num_neighbors: votes per sample, weighted equally; the nearest decides a tie.
    """

    full_state_update = False
    embeddings: list[Tensor]
    labels: list[Tensor]

    def __init__(self, num_neighbors: int = 5) -> None:
        super().__init__()
        self.num_neighbors = num_neighbors
        self.add_state("embeddings", default=[], dist_reduce_fx="cat")
        self.add_state("labels", default=[], dist_reduce_fx="cat")

    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Keep embeddings of length 1, (B, D), and their labels, (B,)."""
        self.embeddings.append(embeddings.detach())
        self.labels.append(labels)

    def compute(self) -> Tensor:
        """Compare every sample with every other."""
        embeddings, labels = _cat(self.embeddings), _cat(self.labels)
        similarities = embeddings @ embeddings.T  # (N, N)
        similarities.fill_diagonal_(-torch.inf)
        num_neighbors = min(self.num_neighbors, len(labels) - 1)
        votes = labels[similarities.topk(num_neighbors, dim=1).indices]  # (N, num_neighbors)
        # A label's votes; those of nearer neighbours count a little more.
        agree = votes[:, :, None] == votes[:, None, :]  # (N, num_neighbors, num_neighbors)
        winner = agree.sum(dim=2).argmax(dim=1)  # the first of equals is the nearest
        return (votes.gather(1, winner[:, None])[:, 0] == labels).float().mean()


def _cat(state: Any) -> Tensor:
    """A state's rows; Torchmetrics has joined them already where there are several processes."""
    return state if isinstance(state, Tensor) else torch.cat(state)
