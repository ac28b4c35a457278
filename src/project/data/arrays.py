"""Inputs and targets from NumPy's files, mapped: they may be larger than memory."""

import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness import SplitDataModule, UserError
from project.data.memory import Rows


def opened(key: str, name: str) -> NDArray[Any]:
    """Map the array of a ``.npy`` file and look for numbers that are not finite."""
    try:
        array: NDArray[Any] = np.load(Path(name), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"data.{key}={name} is no .npy file of numbers: {error}") from error
    if array.ndim == 0 or array.dtype.kind not in "biuf" or not len(array):
        raise UserError(f"data.{key}={name} has the shape {array.shape} and type {array.dtype}.")
    for first in range(0, len(array) if array.dtype.kind == "f" else 0, 4096):
        is_finite = np.isfinite(array[first : first + 4096]).reshape(-1, array[0].size).all(axis=1)
        if not is_finite.all():
            raise UserError(
                f"data.{key}={name} has NaN or an infinite number at sample "
                f"{first + int(is_finite.argmin())}."
            )
    return array


class Arrays(SplitDataModule):
    """Samples of two arrays; whole numbers as targets are classes from 0, others are numbers.

    Args:
        inputs: a ``.npy`` file of shape (N, ...).
        targets: likewise, shape (N,), or (N, K) for several numbers.
        predict_inputs: new inputs; ``None`` predicts on those of the test.
        **kwargs: see ``SplitDataModule``.
    """

    def __init__(
        self, inputs: str, targets: str, predict_inputs: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.inputs_file, self.targets_file = inputs, targets
        self.predict_file = predict_inputs

    @cached_property
    def pair(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All inputs and targets."""
        inputs = opened("inputs", self.inputs_file)
        targets = opened("targets", self.targets_file)
        if inputs.ndim < 2 or len(inputs) != len(targets):
            raise UserError(
                f"data.inputs={self.inputs_file} has the shape {inputs.shape}, and data.targets="
                f"{self.targets_file} {targets.shape}: they must be (N, ...) and (N,) or (N, K)."
            )
        if targets.dtype.kind == "f":
            return inputs, np.asarray(targets, np.float32)
        if targets.ndim > 1 or targets.min() < 0 or targets.max() >= max(len(targets), 2):
            raise UserError(
                f"data.targets={self.targets_file} has whole numbers of shape {targets.shape} from "
                f"{targets.min()} to {targets.max()}, and classes are (N,) from 0.\n"
                "For numbers, save targets.astype('float32')."
            )
        return inputs, np.asarray(targets, np.int64)

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Positions of the samples of each split."""
        targets = self.pair[1]
        is_classes = targets.dtype.kind == "i"
        return self.split(len(targets), targets if is_classes else None)

    def learn(self) -> dict[str, Any]:
        """Sizes, and the number of classes or the scale of numbers."""
        inputs, targets = self.pair
        facts = {
            "in_features": int(np.prod(inputs.shape[1:])),
            "in_channels": inputs.shape[1],
            "cardinalities": [],
            "drawn_from": self.drawn_from(zlib.crc32(np.ascontiguousarray(targets).data)),
        }
        if targets.dtype.kind == "i":
            return facts | {"num_classes": max(2, int(targets.max()) + 1)}
        train = targets[self.rows["train"]].astype(np.float64)
        scale = {"target_mean": float(train.mean()), "target_std": float(train.std()) or 1.0}
        return facts | scale | {"num_outputs": int(np.prod(targets.shape[1:]))}

    def make_dataset(self, split: str) -> Rows:
        """The samples of one split."""
        if split == "predict" and self.predict_file is not None:
            inputs = opened("predict_inputs", self.predict_file)
            if int(np.prod(inputs.shape[1:])) != self.facts["in_features"]:
                raise UserError(
                    f"data.predict_inputs={self.predict_file} has samples of shape "
                    f"{inputs.shape[1:]}, which differs from the training."
                )
            return Rows(inputs, None, np.arange(len(inputs)))
        inputs, targets = self.pair
        if split != "train":
            self.warn_if_changed(zlib.crc32(np.ascontiguousarray(targets).data))
        return Rows(inputs, targets, self.rows["test" if split == "predict" else split])
