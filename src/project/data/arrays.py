"""Inputs and targets from two ``.npy`` files, which are mapped and may be larger than memory."""

import zlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import SplitDataModule, UserError
from project.data.array_dataset import ArrayDataset


def read_array(key: str, path: str) -> NDArray[Any]:
    """Map the array of a ``.npy`` file.

    Args:
        key: the key below ``data`` that names the file, for messages.
        path: the file.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"data.{key}={path} cannot be read as .npy: {error}\n"
            f"Name a file that numpy.save wrote: data.{key}=<file>"
        ) from error
    if array.dtype.kind not in "biuf":
        raise UserError(
            f"data.{key}={path} has the type {array.dtype}.\nSave integers, floats or booleans."
        )
    return array


class Arrays(SplitDataModule):
    """Samples of two arrays. Integer targets are classes from 0, float targets are numbers.

    Args:
        inputs: a ``.npy`` file of shape (N, ...).
        targets: a ``.npy`` file of shape (N,), or (N, K) for K numbers per sample.
        predict_inputs: a file of new inputs; ``None`` predicts on the test split.
        **kwargs: see ``SplitDataModule``.
    """

    def __init__(
        self, inputs: str, targets: str, predict_inputs: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.inputs_file, self.targets_file, self.predict_file = inputs, targets, predict_inputs

    @cached_property
    def pair(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All inputs and targets, with int64 or float32 targets."""
        inputs = read_array("inputs", self.inputs_file)
        targets = read_array("targets", self.targets_file)
        is_classes = targets.dtype.kind != "f"
        shapes_fit = inputs.ndim > 1 and inputs.shape[:1] == targets.shape[:1]
        if not shapes_fit or (is_classes and (targets.ndim > 1 or targets.min(initial=0) < 0)):
            raise UserError(
                f"data.inputs={self.inputs_file} has the shape {inputs.shape}. data.targets="
                f"{self.targets_file} has the shape {targets.shape} and the type {targets.dtype}.\n"
                "Inputs must have the shape (N, ...). For classes, targets must be integers from 0 "
                "with the shape (N,). For numbers, targets must be float32 with the shape (N,) or "
                "(N, K)."
            )
        return inputs, np.asarray(targets, np.int64 if is_classes else np.float32)

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Indices of the samples of each split."""
        _, targets = self.pair
        return self.split(len(targets), targets if targets.dtype.kind == "i" else None)

    @cached_property
    def checksum(self) -> int:
        """Checksum of the targets, to warn if the file has changed since training."""
        return zlib.crc32(np.ascontiguousarray(self.pair[1]).data)

    def infer_facts(self) -> dict[str, Any]:
        """Return sizes, and the number of classes or mean and deviation of the targets."""
        inputs, targets = self.pair
        facts = {
            "in_features": int(np.prod(inputs.shape[1:])),
            "in_channels": inputs.shape[1],
            "cardinalities": [],  # no categorical columns
            "drawn_from": self.drawn_from(self.checksum),
        }
        if targets.dtype.kind == "i":
            return facts | {"num_classes": max(2, int(targets.max()) + 1)}
        train = targets[self.rows["train"]].astype(np.float64)
        return facts | {"target_mean": float(train.mean()), "target_std": float(train.std()) or 1.0}

    def make_dataset(self, split: str) -> ArrayDataset:
        """Make the data set of one split."""
        if split == "predict" and self.predict_file is not None:
            return ArrayDataset(read_array("predict_inputs", self.predict_file))
        if split != "train":
            self.warn_if_changed(self.checksum)
        return ArrayDataset(*self.pair, self.rows["test" if split == "predict" else split])
