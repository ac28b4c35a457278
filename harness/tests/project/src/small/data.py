"""Generated images, for the library's tests."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import BatchedDataset, DataModule, uniform

SIDE = 8  # pixels


class ArrayDataset(BatchedDataset):
    """Selected rows of arrays as a data set.

    Args:
        inputs: shape (N, ...).
        targets: classes or numbers, shape (N, ...); with ``None`` a batch has inputs alone.
        rows: indices of the selected rows, shape (n,); ``None`` selects all.
        sample_columns: further columns of prediction tables, each with n values.
        augment: called with inputs (B, ...) and random numbers in [0, 1) of shape (B, num_draws).
        num_draws: random numbers per sample for ``augment``.
        seed: the random numbers depend on the seed, the epoch and the sample's index.
    """

    def __init__(
        self,
        inputs: NDArray[Any],
        targets: NDArray[Any] | None = None,
        rows: NDArray[np.int64] | None = None,
        sample_columns: Mapping[str, Sequence[Any]] | None = None,
        augment: Callable[[Tensor, Tensor], Tensor] | None = None,
        num_draws: int = 0,
        seed: int = 0,
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.rows = np.arange(len(inputs)) if rows is None else rows
        self.sample_columns = sample_columns or {}
        self.augment, self.num_draws, self.seed = augment, num_draws, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor] | Tensor:
        """Read a batch: inputs of shape (B, ...), and targets of shape (B, ...)."""
        rows = self.rows[indices]
        inputs = torch.from_numpy(self.inputs.take(rows, axis=0).astype(np.float32, copy=False))
        if self.augment is not None:
            # The draws depend on (seed, epoch, sample) alone, not on the strategy or the worker.
            draws = uniform(self.seed, self.epoch_of(indices), indices, self.num_draws)
            inputs = self.augment(inputs, torch.from_numpy(draws))
        if self.targets is None:
            return inputs
        return inputs, torch.from_numpy(self.targets.take(rows, axis=0))


def add_noise(images: Tensor, draws: Tensor, noise: float) -> Tensor:
    """Change each pixel by up to ``noise``, within [0, 1].

    Args:
        images: values in [0, 1], shape (B, 1, H, W).
        draws: numbers in [0, 1), shape (B, H * W).
        noise: the largest change.
    """
    change = (2 * draws - 1).float().reshape(images.shape)
    return (images + noise * change).clamp(0, 1)


class Synthetic(DataModule):
    """Blurred pictures of ten random shapes, generated in memory without a download.

    Args:
        num_train: training images.
        num_val: validation images.
        num_test: test images, on which predict.py predicts as well.
        num_classes: number of shapes; each is a class.
        blur: how much the images of one class differ; more makes the task harder.
        noise: each pixel of a training image changes by up to this much.
        data_seed: seed of the images; independent of the run's seed, so that runs are comparable.
        **kwargs: see ``DataModule``.
    """

    in_channels, in_features = 1, SIDE**2

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
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        self.num_classes, self.blur, self.noise = num_classes, blur, noise
        self.data_seed = data_seed

    def make_dataset(self, split: str) -> ArrayDataset:
        """Generate the images of one split. Read your own data here: files, a table, an API."""
        split = "test" if split == "predict" else split
        shapes = np.random.default_rng(self.data_seed).random((self.num_classes, SIDE, SIDE))
        rng = np.random.default_rng([self.data_seed, 1 + list(self.sizes).index(split)])
        labels = rng.integers(self.num_classes, size=self.sizes[split])
        images = shapes[labels] + self.blur * rng.standard_normal((len(labels), SIDE, SIDE))
        is_augmented = split == "train" and self.augment and self.noise
        return ArrayDataset(
            images.clip(0, 1).astype(np.float32)[:, None],  # (N, 1, H, W)
            labels,
            augment=partial(add_noise, noise=self.noise) if is_augmented else None,
            num_draws=SIDE**2,
            seed=self.seed,
        )
