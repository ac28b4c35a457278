from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from harness import Picture

COLUMNS = 4  # images side by side


class WorstMistakes(Picture):
    """Show in TensorBoard the test images that were wrong with the most confidence.

    It reads ``inputs``, ``labels`` and ``logits`` from what ``test_step`` returns, and draws
    nothing unless inputs are images of shape (B, C, H, W) with 1 or 3 channels. Where the data
    module says how it has normalised them, by a ``mean`` and a ``std`` for each channel, that is
    undone; other values outside of [0, 1] are scaled to it image by image. Classes have the names
    of its fact ``class_names``.

    Args:
        num_images: how many are shown.
    """

    name = "test/worst_mistakes"
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    class_names: Sequence[str] = ()

    def __init__(self, num_images: int = 16) -> None:
        self.num_images = num_images

    def on_test_start(self, trainer: pl.Trainer, *others: Any) -> None:
        """Ask the data module how its images are to be read."""
        data = getattr(trainer, "datamodule", None)
        self.mean, self.std = getattr(data, "mean", ()), getattr(data, "std", ())
        self.class_names = getattr(data, "facts", {}).get("class_names", ())
        super().on_test_start(trainer, *others)

    def reset(self) -> None:
        """Forget an earlier test."""
        self.worst: dict[str, Tensor] = {}

    def update(self, outputs: dict[str, Tensor], batch: Any) -> None:
        """Keep the worst of this batch and of those before."""
        images, labels, logits = outputs["inputs"], outputs["labels"], outputs["logits"]
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            return  # of a table, or of another kind: there is nothing to show
        predictions = logits.argmax(dim=1)
        losses = F.cross_entropy(logits, labels, reduction="none")
        found = {
            "losses": torch.where(predictions != labels, losses, -1.0),
            "images": images,
            "labels": labels,
            "predictions": predictions,
        }
        self.worst = self.largest([self.worst, found] if self.worst else [found])

    def largest(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The images with the largest losses, the largest first."""
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        order = joined["losses"].argsort(descending=True)[: self.num_images]
        return {key: value[order] for key, value in joined.items()}

    def kept(self) -> dict[str, Tensor]:
        """The worst of this process; nothing where it had no sample."""
        return {key: value.cpu() for key, value in self.worst.items()}

    def draw(self, parts: list[dict[str, Tensor]]) -> Figure | None:
        """Draw a grid of images with what they are and what they were taken for."""
        if not any(parts):
            return None
        worst = self.largest([part for part in parts if part])
        wrong = worst["losses"] >= 0  # right answers were marked with -1
        images = worst["images"][wrong].float().movedim(1, -1)  # (N, H, W, C)
        rows = max(1, -(-len(images) // COLUMNS))
        figure = Figure(figsize=(6, 1.7 * rows), layout="constrained")
        title = "Test mistakes, most confident first" if len(images) else "No test mistakes"
        figure.suptitle(title)
        labels, predictions = worst["labels"][wrong], worst["predictions"][wrong]
        for i, image in enumerate(images):
            axes = figure.add_subplot(rows, COLUMNS, i + 1)
            label, prediction = self.called(int(labels[i])), self.called(int(predictions[i]))
            axes.set_title(f"{label}, taken for {prediction}", fontsize=9)
            if len(self.mean) == len(self.std) == image.shape[-1]:
                image = (image * torch.tensor(self.std) + torch.tensor(self.mean)).clamp(0, 1)
            low, high = image.min(), image.max()
            if low < 0 or high > 1:
                image = (image - low) / (high - low).clamp(min=1e-12)
            axes.imshow(image.numpy(), cmap="gray")
            axes.axis("off")
        return figure

    def called(self, label: int) -> str:
        """The name of a class, or its number where it has none."""
        return self.class_names[label] if label < len(self.class_names) else str(label)
