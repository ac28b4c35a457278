"""A picture of the test's confusion matrix."""

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import multiclass_confusion_matrix

from harness import Picture


class ConfusionMatrix(Picture):
    """Draw the test's confusion matrix in TensorBoard.

    The module's ``test_step`` must return a dict with ``labels`` and ``logits``.

    Args:
        num_classes: classes from 0 to ``num_classes - 1``.
    """

    name = "test/confusion_matrix"

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts = torch.zeros(self.num_classes, self.num_classes, dtype=torch.long)

    def update(self, outputs: dict[str, Tensor], batch: Any) -> None:
        """Add the counts of one batch, on the device, because a copy to the host synchronises."""
        counts = multiclass_confusion_matrix(outputs["logits"], outputs["labels"], self.num_classes)
        self.counts = self.counts.to(counts.device) + counts

    def kept(self) -> Tensor:
        """Return this rank's counts on the CPU, shape (true class, predicted class)."""
        return self.counts.cpu()

    def draw(self, parts: list[Tensor]) -> Figure:
        """Draw the sum of the ranks' counts."""
        counts = torch.stack(parts).sum(dim=0)
        fraction = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        figure = Figure(figsize=(6, 5), layout="constrained")
        axes = figure.add_subplot(xlabel="predicted", ylabel="true", title="Test confusion matrix")
        image = axes.imshow(fraction.numpy(), cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, label="fraction of the true class")
        for row, column in counts.nonzero().tolist():
            color = "white" if fraction[row, column] > 0.5 else "black"
            text = str(int(counts[row, column]))
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
        return figure
