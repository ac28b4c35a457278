from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from harness import DataModule
from project.data.memory import InMemory

SIDE = 8
MAX_VALUE = 16  # pixels are counts from 0 to 16


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

    num_classes, in_channels, in_features = 10, 1, SIDE**2

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

    def make_dataset(self, split: str) -> InMemory:
        """Read the images of one split; predictions are made on those of the test."""
        digits = load_digits()
        images = torch.from_numpy(digits.images).unsqueeze(1).float() / MAX_VALUE
        labels = torch.from_numpy(digits.target.astype(np.int64))
        indices = self.split_indices(digits.target)["test" if split == "predict" else split]
        is_augmented = split == "train" and self.augment and self.max_shift
        augment = partial(shift, max_shift=self.max_shift) if is_augmented else None
        return InMemory(images[indices], labels[indices], augment, num_draws=2, seed=self.seed)

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
