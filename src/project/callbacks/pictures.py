"""Pictures of a test in TensorBoard: which classes are mistaken, and the worst mistakes."""

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from harness import Picture

COLUMNS = 4  # images side by side


class ConfusionMatrix(Picture):
    """Show in TensorBoard which classes the test mistakes for which.

    It reads ``labels`` and ``logits`` from what ``test_step`` returns.

    Args:
        num_classes: classes from 0 to ``num_classes - 1``.
    """

    name = "test/confusion_matrix"

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def reset(self) -> None:
        """Start to count."""
        self.counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.long)

    def update(self, outputs: dict[str, Tensor], batch: Any) -> None:
        """Count one batch, on the device: reading the counts would wait for it."""
        counts = multiclass_confusion_matrix(outputs["logits"], outputs["labels"], self.num_classes)
        self.counts = self.counts.to(counts.device) + counts

    def kept(self) -> Tensor:
        """Return the counts, shape (true class, predicted class)."""
        return self.counts.cpu()

    def draw(self, parts: list[Tensor]) -> Figure:
        """Draw the sum of the processes' counts."""
        counts = torch.stack(parts).sum(dim=0)
        share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="predicted", ylabel="true", title="Test confusion matrix")
        image = axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, label="share of the true class")
        for row, column in counts.nonzero().tolist():
            color = "white" if share[row, column] > 0.5 else "black"
            text = str(int(counts[row, column]))
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        return figure


class WorstMistakes(Picture):
    """Show in TensorBoard the test images that were wrong with the most confidence.

    It reads ``inputs``, ``labels`` and ``logits`` from what ``test_step`` returns, and draws
    nothing unless inputs are images of shape (B, C, H, W) with 1 or 3 channels. Where the data
    module has a ``mean`` and a ``std`` for each channel, by which it normalised, that is undone.

    Args:
        num_images: how many are shown.
    """

    name = "test/worst_mistakes"
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)
    class_names: Sequence[str] = ()

    def __init__(self, num_images: int = 16) -> None:
        self.num_images = num_images

    def on_test_start(self, trainer: pl.Trainer, *others: Any) -> None:
        """Ask the data module how its images are to be read."""
        data = getattr(trainer, "datamodule", None)
        self.mean, self.std = getattr(data, "mean", (0.0,)), getattr(data, "std", (1.0,))
        self.class_names = getattr(data, "facts", {}).get("class_names", ())
        super().on_test_start(trainer, *others)

    def reset(self) -> None:
        """Forget an earlier test."""
        self.worst: dict[str, Tensor] = {}

    def update(self, outputs: dict[str, Tensor], batch: Any) -> None:
        """Keep the worst of this batch and of those before."""
        images, labels, logits = outputs["inputs"], outputs["labels"], outputs["logits"]
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            return
        predictions = logits.argmax(dim=1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        losses = torch.where(predictions != labels, losses, -1.0)  # right answers are not drawn
        batch_worst = {"losses": losses, "images": images, "labels": labels}
        batch_worst["predictions"] = predictions
        self.worst = self.largest([self.worst, batch_worst] if self.worst else [batch_worst])

    def largest(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the images with the largest losses, the largest first."""
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        order = joined["losses"].argsort(descending=True)[: self.num_images]
        return {key: value[order] for key, value in joined.items()}

    def kept(self) -> dict[str, Tensor]:
        """Return the worst images of this process; empty if it had no sample."""
        return {key: value.cpu() for key, value in self.worst.items()}

    def draw(self, parts: list[dict[str, Tensor]]) -> Figure | None:
        """Draw a grid of images with their labels and the wrong predictions."""
        if not any(parts):
            return None
        worst = self.largest([part for part in parts if part])
        worst = {key: value[worst["losses"] >= 0] for key, value in worst.items()}
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        images = (worst["images"].float().movedim(1, -1) * std + mean).clamp(0, 1)  # (N, H, W, C)
        rows = max(1, -(-len(images) // COLUMNS))
        figure = Figure(figsize=(6, 1.7 * rows), layout="constrained")
        figure.suptitle("Test mistakes, most confident first" if len(images) else "No mistakes")
        for i, image in enumerate(images):
            axes = figure.add_subplot(rows, COLUMNS, i + 1)
            label, prediction = (
                self.class_names[int(worst[key][i])] if self.class_names else int(worst[key][i])
                for key in ("labels", "predictions")
            )
            axes.set_title(f"{label}, taken for {prediction}", fontsize=9)
            axes.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1)
            axes.axis("off")
        return figure
