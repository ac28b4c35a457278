from typing import Any

import pytorch_lightning as pl
from matplotlib.figure import Figure
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from harness.exact.evaluation import is_filler
from harness.loggers.figures import add_figure


class ConfusionMatrix(pl.Callback):
    """Show in TensorBoard which classes the test mistakes for which.

    It reads ``labels`` and ``logits`` from what ``test_step`` returns.

    Args:
        num_classes: classes from 0 to ``num_classes - 1``.
    """

    def __init__(self, num_classes: int) -> None:
        self.matrix = MulticlassConfusionMatrix(num_classes)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to count."""
        self.matrix.reset()
        self.matrix.to(pl_module.device)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Count one batch."""
        if not is_filler(trainer):
            self.matrix.update(outputs["logits"], outputs["labels"])

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sum over the processes and draw."""
        counts = self.matrix.compute().cpu()
        draw(trainer, counts)


@rank_zero_only
def draw(trainer: pl.Trainer, counts: Tensor) -> None:
    """Draw ``counts``, shape (true class, predicted class), where a logger takes figures."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true", title="Test confusion matrix")
    share = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    image = axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the true class")
    classes = range(len(counts))
    axes.set_xticks(classes)
    axes.set_yticks(classes)
    for row in classes:
        for column in classes:
            if counts[row, column]:
                color = "white" if share[row, column] > 0.5 else "black"
                text = str(int(counts[row, column]))
                axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8)
    add_figure(trainer, "test/confusion_matrix", figure)
