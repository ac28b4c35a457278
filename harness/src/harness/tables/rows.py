"""Rows of arrays as batches, and the splits of what lies in one array."""

import logging
import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.data.batches import BatchedDataset
from harness.data.datamodule import DataModule
from harness.data.splits import split_positions

log = logging.getLogger(__name__)


class Rows(BatchedDataset):
    """Some rows of an array, with their targets, read as whole batches.

    Args:
        inputs: shape (N, ...), in memory or mapped; batches have 32 bits.
        targets: classes or numbers, shape (N, ...); ``None`` leaves them out of the batches.
        positions: the rows that count, shape (n,); ``None`` takes all.
        sample_columns: what tables of predictions say of the rows that count, by column.
    """

    def __init__(
        self,
        inputs: NDArray[Any],
        targets: NDArray[Any] | None = None,
        positions: NDArray[np.int64] | None = None,
        sample_columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        self.inputs, self.targets, self.positions = inputs, targets, positions
        self.sample_columns = sample_columns or {}

    def __len__(self) -> int:
        return len(self.inputs if self.positions is None else self.positions)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor] | Tensor:
        """Read a batch: inputs of shape (B, ...), and targets of shape (B, ...)."""
        rows = np.asarray(indices)
        rows = rows if self.positions is None else self.positions[rows]
        taken = self.inputs.take(rows, axis=0).astype(np.float32, copy=False)
        inputs = torch.from_numpy(np.asarray(taken))
        if self.targets is None:
            return inputs
        return inputs, torch.from_numpy(np.asarray(self.targets.take(rows, axis=0)))


class SplitRows(DataModule):
    """A data module that splits the rows of one array.

    Args:
        val_fraction: share of the rows kept for validation.
        test_fraction: share of the rows kept for the test.
        split_seed: decides which rows; independent of the run's seed, so that runs compare.
        fold: which of ``num_folds`` parts is the test split, from 0; ``None`` draws
            ``test_fraction``.
        num_folds: parts of equal size.
        **kwargs: see ``DataModule``.
    """

    def __init__(
        self,
        val_fraction: float = 0.15,
        test_fraction: float = 0.15,
        split_seed: int = 0,
        fold: int | None = None,
        num_folds: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.split_seed, self.fold, self.num_folds = split_seed, fold, num_folds

    @abstractmethod
    def targets_of_rows(self) -> tuple[NDArray[Any], list[str] | None]:
        """All rows' targets, and the names of classes: then -1 has no target, and else NaN."""

    def split(
        self, targets: NDArray[Any], class_names: list[str] | None
    ) -> dict[str, NDArray[np.int64]]:
        """Positions of the rows of each split; rows without a target are in none."""
        if class_names is None:
            known = np.flatnonzero(~np.isnan(targets.reshape(len(targets), -1)).any(axis=1))
        else:
            known = np.flatnonzero(targets >= 0)
        found = split_positions(
            len(known),
            val_fraction=self.val_fraction,
            test_fraction=self.test_fraction,
            seed=self.split_seed,
            classes=None if class_names is None else targets[known],
            class_names=class_names,
            fold=self.fold,
            num_folds=self.num_folds,
        )
        return {name: known[positions] for name, positions in found.items()}

    @cached_property
    def split_rows(self) -> dict[str, NDArray[np.int64]]:
        """Positions of the rows of each split; others than in training are told."""
        targets, class_names = self.targets_of_rows()
        if self.facts.get("checksum", checksum(targets)) != checksum(targets):
            log.warning(
                "The targets are others than in training, and so may be the split: the test may be "
                "on rows that were trained on."
            )
        return self.split(targets, class_names)

    @property
    def target_mean(self) -> float:
        """Mean of the training rows' targets; 0 for classes."""
        return float(self.facts.get("target_mean", 0.0))

    @property
    def target_std(self) -> float:
        """Standard deviation of the training rows' targets; 1 where they are all the same."""
        return float(self.facts.get("target_std", 1.0))


def checksum(targets: NDArray[Any]) -> int:
    """By which a run knows whether it was these that were split in training."""
    return zlib.crc32(np.ascontiguousarray(targets).data)


def scale_of(targets: NDArray[Any]) -> dict[str, float]:
    """Facts of targets that are numbers."""
    return {
        "target_mean": float(targets.mean(dtype=np.float64)),
        "target_std": float(targets.std(dtype=np.float64)) or 1.0,
    }
