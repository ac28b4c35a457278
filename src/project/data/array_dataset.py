"""Samples of arrays, in memory or mapped from files, read as whole batches.

In: NumPy arrays of all samples, and the rows of a split. Out: float32 inputs, with targets. Next:
the data modules beside this file make one data set per split.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import BatchedDataset, uniform


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
