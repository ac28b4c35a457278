from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from harness import Batch, BatchedDataset, DataModule, uniform

ImageBatch: TypeAlias = tuple[Tensor, Tensor]

SIDE = 8  # pixels


class SyntheticImages(BatchedDataset):
    """Images with labels in memory, read as whole batches.

    Args:
        images: values in [0, 1], shape (N, 1, H, W).
        labels: classes from 0, shape (N,), int64.
        noise: augment by changing each pixel by up to this much.
        seed: decides, with the epoch and the sample's index, what the noise is.
    """

    def __init__(self, images: Tensor, labels: Tensor, noise: float = 0.0, seed: int = 0) -> None:
        self.images, self.labels = images, labels
        self.noise, self.seed = noise, seed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> ImageBatch:
        """Read a batch: images in [0, 1] of shape (B, 1, H, W), labels of shape (B,)."""
        rows = torch.tensor(indices)
        # index_select copies whole rows: three times as fast as images[rows].
        images = self.images.index_select(0, rows)
        if self.noise:
            epoch = indices.epoch if isinstance(indices, Batch) else 0
            # Drawn from (seed, epoch, sample): the same whatever the strategy and the worker.
            draws = torch.from_numpy(uniform(self.seed, epoch, indices, images[0].numel()))
            change = (2 * draws - 1).float().reshape(images.shape)
            images = (images + self.noise * change).clamp(0, 1)
        return images, self.labels.index_select(0, rows)


class Synthetic(DataModule):
    """Blurred pictures of ten random shapes, made when they are needed: nothing to download.

    Args:
        num_train: training images.
        num_val: validation images.
        num_test: test images; predictions are made on them as well.
        num_classes: shapes, a class each.
        blur: how much the images of one class differ; the task is harder with more.
        noise: augmentation of the training images, per pixel.
        data_seed: decides the images; independent of the run's seed, so that runs compare.
        **kwargs: see ``DataModule``.
    """

    def __init__(
        self,
        num_train: int = 1250,
        num_val: int = 180,
        num_test: int = 360,
        num_classes: int = 10,
        blur: float = 0.5,
        noise: float = 0.0,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if min(blur, noise) < 0:
            raise ValueError(f"blur={blur} and noise={noise} must be 0 or more.")
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        self.num_classes, self.blur, self.noise = num_classes, blur, noise
        self.data_seed = data_seed

    def make_dataset(self, split: str) -> SyntheticImages:
        """Make the images of one split. Data of your own is read here: files, a table, an API."""
        split = "test" if split == "predict" else split
        shapes = np.random.default_rng(self.data_seed).random((self.num_classes, SIDE, SIDE))
        rng = np.random.default_rng([self.data_seed, 1 + list(self.sizes).index(split)])
        labels = rng.integers(self.num_classes, size=self.sizes[split])
        images = shapes[labels] + self.blur * rng.standard_normal((len(labels), SIDE, SIDE))
        return SyntheticImages(
            torch.from_numpy(images.clip(0, 1).astype(np.float32)).unsqueeze(1),
            torch.from_numpy(labels),
            self.noise if split == "train" and self.augment else 0.0,
            self.seed,
        )
