"""Samples of arrays, in memory or mapped from files, read as whole batches.

In: NumPy arrays of all samples, and the rows of a split. Out: batches of 32 bits. Next: the
data modules beside this file make their splits of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import BatchedDataset, uniform


class ArrayDataset(BatchedDataset):
    """Some rows of arrays.

    Args:
        inputs: shape (N, ...).
        targets: classes or numbers, shape (N, ...); ``None`` leaves them out of the batches.
        rows: positions of the samples, shape (n,); ``None`` takes all.
        sample_columns: columns of prediction tables, each with a value for each of the samples.
        augment: called with inputs (B, ...) and random numbers in [0, 1) of shape (B, num_draws).
        num_draws: random numbers that a sample's augmentation takes.
        seed: decides, with the epoch and the sample's index, which numbers these are.
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
            # Drawn from (seed, epoch, sample): the same whatever the strategy and the worker.
            draws = uniform(self.seed, self.epoch_of(indices), indices, self.num_draws)
            inputs = self.augment(inputs, torch.from_numpy(draws))
        if self.targets is None:
            return inputs
        return inputs, torch.from_numpy(self.targets.take(rows, axis=0))
