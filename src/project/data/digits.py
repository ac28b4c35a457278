from typing import Any, TypeAlias

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from harness import Batch, BatchedDataset, DataModule, uniform

ImageBatch: TypeAlias = tuple[Tensor, Tensor]

SIDE = 8
MAX_VALUE = 16  # pixels are counts from 0 to 16


class DigitImages(BatchedDataset):
    """Images with labels in memory, read as whole batches.

    Args:
        images: pixel counts, shape (N, 1, 8, 8), uint8.
        labels: classes from 0 to 9, shape (N,), int64.
        max_shift: augment by moving each image up to this many pixels each way.
        seed: decides, with the epoch and the sample's index, how far each image moves.
    """

    def __init__(self, images: Tensor, labels: Tensor, max_shift: int = 0, seed: int = 0) -> None:
        self.images, self.labels = images, labels
        self.max_shift, self.seed = max_shift, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> ImageBatch:
        """Read a batch: images in [0, 1] of shape (B, 1, 8, 8), and labels of shape (B,)."""
        rows = torch.tensor(indices)
        # index_select copies whole rows: three times as fast as images[rows].
        images = self.images.index_select(0, rows).float() / MAX_VALUE
        if self.max_shift:
            epoch = indices.epoch if isinstance(indices, Batch) else 0
            draws = uniform(self.seed, epoch, indices, 2)
            images = shift(images, torch.from_numpy(draws), self.max_shift)
        return images, self.labels.index_select(0, rows)


def shift(images: Tensor, draws: Tensor, max_shift: int) -> Tensor:
    """Move each image by a whole number of pixels; what enters at the edge is 0.

    Args:
        images: shape (B, C, H, W).
        draws: numbers in [0, 1) for rows and columns, shape (B, 2).
        max_shift: the largest distance, in pixels.
    """
    num_images, _, height, width = images.shape
    offsets = (draws * (2 * max_shift + 1)).long()  # (B, 2) from 0 to 2 * max_shift
    padded = torch.nn.functional.pad(images, [max_shift] * 4)
    rows = offsets[:, :1] + torch.arange(height)  # (B, H)
    columns = offsets[:, 1:] + torch.arange(width)  # (B, W)
    batch = torch.arange(num_images)[:, None, None]
    # Advanced indices around a slice put the channel last: (B, H, W, C).
    return padded[batch, :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


class Digits(DataModule):
    """1,797 handwritten digits of 8x8 pixels (UCI Optical Recognition; part of scikit-learn).

    Args:
        test_fraction: share of the images kept for the test, drawn per class.
        val_fraction: share kept for validation, drawn per class.
        split_seed: decides which images; independent of the run's seed, so that runs compare.
        max_shift: augmentation of the training images, in pixels.
        **kwargs: see ``DataModule``.
    """

    num_classes = 10

    def __init__(
        self,
        test_fraction: float = 0.2,
        val_fraction: float = 0.1,
        split_seed: int = 0,
        max_shift: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= max_shift < SIDE:
            raise ValueError(f"max_shift={max_shift} must be a number of pixels below {SIDE}.")
        self.test_fraction, self.val_fraction = test_fraction, val_fraction
        self.split_seed, self.max_shift = split_seed, max_shift

    def make_dataset(self, split: str) -> DigitImages:
        """Read the images of one split; predictions are made on those of the test."""
        digits = load_digits()
        images = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
        labels = torch.from_numpy(digits.target.astype(np.int64))
        indices = self.split_indices(digits.target)["test" if split == "predict" else split]
        max_shift = self.max_shift if split == "train" and self.augment else 0
        return DigitImages(images[indices], labels[indices], max_shift, self.seed)

    def split_indices(self, labels: Any) -> dict[str, Any]:
        """Split positions into train, val and test, each with the classes in proportion."""
        rest, test = train_test_split(
            np.arange(len(labels)),
            test_size=self.test_fraction,
            stratify=labels,
            random_state=self.split_seed,
        )
        train, val = train_test_split(
            rest,
            test_size=self.val_fraction / (1 - self.test_fraction),
            stratify=labels[rest],
            random_state=self.split_seed,
        )
        return {"train": train, "val": val, "test": test}
