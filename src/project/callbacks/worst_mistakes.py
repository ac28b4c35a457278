from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from harness.exact.evaluation import is_filler
from harness.loggers.figures import add_figure


class WorstMistakes(pl.Callback):
    """Show in TensorBoard the test images that were wrong with the most confidence.

    It reads ``inputs``, ``labels`` and ``logits`` from what ``test_step`` returns; the inputs
    must be images of shape (B, C, H, W) with 1 or 3 channels in [0, 1].

    Args:
        num_images: how many are shown.
    """

    def __init__(self, num_images: int = 16) -> None:
        self.num_images = num_images
        self.worst: dict[str, Tensor] = {}

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget an earlier test."""
        self.worst = {}

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Keep the worst of this batch and of those before."""
        labels, logits = outputs["labels"], outputs["logits"]
        losses = F.cross_entropy(logits, labels, reduction="none")
        is_mistake = logits.argmax(dim=1) != labels
        if is_filler(trainer):
            is_mistake = torch.zeros_like(is_mistake)  # another process shows it
        batch = {
            "losses": torch.where(is_mistake, losses, -1.0),
            "images": outputs["inputs"],
            "labels": labels,
            "predictions": logits.argmax(dim=1),
        }
        self.worst = self._largest([self.worst, batch] if self.worst else [batch])

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the processes' worst together and draw."""
        # Ranks may hold different numbers of images, which tensors could not be gathered with.
        parts: list[Any] = [None] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(parts, _to_cpu(self.worst))
        else:
            parts = [_to_cpu(self.worst)]
        draw(trainer, self._largest(parts))

    def _largest(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The images with the largest losses, the largest first."""
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        order = joined["losses"].argsort(descending=True)[: self.num_images]
        return {key: value[order] for key, value in joined.items()}


def _to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.cpu() for key, value in tensors.items()}


@rank_zero_only
def draw(trainer: pl.Trainer, worst: dict[str, Tensor]) -> None:
    """Draw a grid of images with what they are and what they were taken for."""
    wrong = worst["losses"] >= 0  # right answers were marked with -1
    images = worst["images"][wrong].movedim(1, -1)  # (N, H, W, C)
    columns = 4
    rows = max(1, -(-len(images) // columns))
    figure = Figure(figsize=(6, 1.7 * rows), layout="constrained")
    figure.suptitle("Test mistakes, most confident first" if len(images) else "No test mistakes")
    for i, image in enumerate(images):
        axes = figure.add_subplot(rows, columns, i + 1)
        label, prediction = int(worst["labels"][wrong][i]), int(worst["predictions"][wrong][i])
        axes.set_title(f"{label}, taken for {prediction}", fontsize=9)
        axes.imshow(image.numpy(), cmap="gray")
        axes.axis("off")
    add_figure(trainer, "test/worst_mistakes", figure)
