"""Batches of images as bytes: out of a packed array, or decoded from files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.data.batches import Batch, BatchedDataset
from harness.data.randomness import uniform
from harness.errors import UserError
from harness.images.augmentation import as_integers
from harness.images.decoding import decode, reason


class PackedPixels:
    """Images in a file, one after another, which every process maps for itself.

    Args:
        path: of the file.
        shape: of one image, (side, side, channels).
    """

    def __init__(self, path: Path, shape: tuple[int, int, int]) -> None:
        self.path, self.shape = path, shape
        self.mapped: NDArray[np.uint8] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"mapped": None}

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """Images (B, side, side, channels), uint8."""
        if self.mapped is None:
            # A plain array: what NumPy adds to a memmap costs each batch some microseconds.
            array = np.asarray(np.memmap(self.path, np.uint8, "r"))
            self.mapped = array.reshape(-1, *self.shape)
        return torch.from_numpy(np.take(self.mapped, rows, axis=0))


class FilePixels:
    """Images that are decoded when they are read.

    Args:
        root: the folder of the files.
        names: of the files below it.
        shape: of one image, (side, side, channels).
    """

    def __init__(self, root: Path, names: Sequence[str], shape: tuple[int, int, int]) -> None:
        # One array of bytes: workers would copy a list of texts as they count references to them.
        self.root, self.shape = root.absolute(), shape
        self.names = np.array([os.fsencode(name) for name in names])

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """Images (B, side, side, channels), uint8."""
        images = np.empty((len(rows), *self.shape), np.uint8)
        for i, name in enumerate(self.names[rows].tolist()):
            path = self.root / os.fsdecode(name)
            try:
                images[i] = decode(path, self.shape[0], self.shape[2])
            except Exception as error:  # it could be read when the run began
                raise UserError(
                    f"{path} could be read when the run began, and cannot now: {reason(error)}.\n"
                    "Put it back, and go on with resume=auto."
                ) from error
        return torch.from_numpy(images)


class ImageDataset(BatchedDataset):
    """Images with their classes.

    A batch is (images, labels), of training (images, labels, draws), without classes images alone:
    images (B, side, side, channels) are uint8, labels (B,), and draws (B, num_draws) what their
    augmentation is drawn from.

    Args:
        pixels: where images are read from.
        rows: their positions there, shape (N,).
        labels: shape (N,), or ``None``.
        num_draws: random numbers for each sample; 0 for no augmentation.
        seed: decides, with the epoch and the sample, which numbers these are.
        sample_names: of the files, for tables of predictions.
        checksums: of the images, shape (N,): by them a run that goes on knows these again.
    """

    def __init__(
        self,
        pixels: PackedPixels | FilePixels,
        rows: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        num_draws: int = 0,
        seed: int = 0,
        sample_names: Sequence[str] = (),
        checksums: NDArray[np.int64] | None = None,
    ) -> None:
        self.pixels, self.rows, self.checksums = pixels, rows, checksums
        self.labels = None if labels is None else torch.from_numpy(labels)
        self.num_draws, self.seed = num_draws, seed
        self.sample_columns = {"file": sample_names} if sample_names else {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Any:
        """Read a batch."""
        images = self.pixels.read(self.rows[indices])
        if self.labels is None:
            return images
        labels = self.labels.index_select(0, torch.tensor(indices))
        if not self.num_draws:
            return images, labels
        epoch = indices.epoch if isinstance(indices, Batch) else 0
        draws = uniform(self.seed, epoch, indices, self.num_draws)
        return images, labels, as_integers(draws)
