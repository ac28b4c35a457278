from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness import Batch, BatchedDataset, uniform


class InMemory(BatchedDataset):
    """Inputs with targets in memory, read as whole batches.

    Args:
        inputs: shape (N, ...).
        targets: classes or numbers, shape (N,); ``None`` leaves them out of the batches.
        augment: called with inputs (B, ...) and random numbers in [0, 1) of shape (B, num_draws).
        num_draws: random numbers that a sample's augmentation takes.
        seed: decides, with the epoch and the sample's index, which numbers these are.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        augment: Callable[[Tensor, Tensor], Tensor] | None = None,
        num_draws: int = 0,
        seed: int = 0,
    ) -> None:
        self.inputs, self.targets, self.augment = inputs, targets, augment
        self.num_draws, self.seed = num_draws, seed

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor] | Tensor:
        """Read a batch: inputs of shape (B, ...), and targets of shape (B,)."""
        rows = torch.tensor(indices)
        # index_select copies whole rows: three times as fast as inputs[rows].
        inputs = self.inputs.index_select(0, rows)
        if self.augment is not None:
            epoch = indices.epoch if isinstance(indices, Batch) else 0
            # Drawn from (seed, epoch, sample): the same whatever the strategy and the worker.
            draws = uniform(self.seed, epoch, indices, self.num_draws)
            inputs = self.augment(inputs, torch.from_numpy(draws))
        return inputs if self.targets is None else (inputs, self.targets.index_select(0, rows))


class Rows(BatchedDataset):
    """Some rows of NumPy's arrays, in memory or mapped, read as whole batches of 32 bits.

    Args:
        inputs: shape (N, ...).
        targets: classes or numbers, shape (N, ...); ``None`` leaves them out of the batches.
        positions: the rows that count, shape (n,).
        sample_columns: columns of prediction tables, each with a value for each of these rows.
    """

    def __init__(
        self,
        inputs: NDArray[Any],
        targets: NDArray[Any] | None,
        positions: NDArray[np.int64],
        sample_columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.inputs, self.targets, self.positions = inputs, targets, positions
        self.sample_columns = sample_columns or {}

    def __len__(self) -> int:
        return len(self.positions)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor] | Tensor:
        """Read a batch: inputs (B, ...), and targets (B, ...)."""
        rows = self.positions[indices]
        inputs = torch.from_numpy(self.inputs.take(rows, axis=0).astype(np.float32, copy=False))
        if self.targets is None:
            return inputs
        return inputs, torch.from_numpy(self.targets.take(rows, axis=0))
