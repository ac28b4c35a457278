"""Class folders of images: ``root/<class>/...`` or ``root/{train,val,test}/<class>/...``.

Each file is decoded once, to a square in one memory-mapped array below ``cache_dir``. Batches are
gathered from it as bytes, and become augmented, normalised numbers on the device that trains.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from harness import Batch, BatchedDataset, SplitDataModule, UserError, cached, uniform
from project.data.image_files import decode_all, find_images, labelled

VERSION = 1  # of what ``decode`` makes: raise it, and images are decoded again
# Of ImageNet, which most pretrained networks expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)
NUM_DRAWS = 8  # random numbers for each image: 4 for its crop, 1 for a flip, 3 for colours


def augment(
    images: Tensor, draws: Tensor, size: int, *, scale: Sequence[float], flip: bool, jitter: float
) -> Tensor:
    """Crop, mirror and recolour each image from its own random numbers.

    Args:
        images: values in [0, 1], shape (B, C, H, W).
        draws: numbers in [0, 1), shape (B, NUM_DRAWS).
        size: of the squares to return.
        scale: least and largest share of the area that a crop keeps.
        flip: whether half of the images are mirrored.
        jitter: most that brightness, contrast and saturation change by, as a share.

    Returns:
        Shape (B, C, size, size).
    """
    area, ratio, x, y, mirrored = draws[:, :5].T
    area = scale[0] + (scale[-1] - scale[0]) * area
    ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3) / 2)  # square root of width by height
    width, height = (area.sqrt() * ratio).clamp(max=1), (area.sqrt() / ratio).clamp(max=1)
    sign = torch.where(mirrored < 0.5, -1.0, 1.0) if flip else 1.0
    # Affine maps from places in the result to places in the image, both from -1 to 1.
    theta = draws.new_zeros(len(draws), 2, 3)
    theta[:, 0, 0], theta[:, 0, 2] = width * sign, (2 * x - 1) * (1 - width)
    theta[:, 1, 1], theta[:, 1, 2] = height, (2 * y - 1) * (1 - height)
    grid = F.affine_grid(theta, [*images.shape[:2], size, size], align_corners=False)
    images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    weights = images.new_tensor([0.299, 0.587, 0.114] if images.shape[1] == 3 else [1.0])
    for kind, draw in enumerate(draws[:, 5:].T if jitter else ()):
        factor = (1 + jitter * (2 * draw - 1))[:, None, None, None]
        grey = (images * weights[:, None, None]).sum(1, keepdim=True)
        reference = (0 * grey, grey.mean((2, 3), keepdim=True), grey)[kind]
        images = (factor * images + (1 - factor) * reference).clamp(0, 1)
    return images


class ImageDataset(BatchedDataset):
    """Images with their classes, read as whole batches.

    A batch is (images, labels), in training (images, labels, draws), without classes images alone:
    uint8 images (B, side, side, channels), labels (B,), draws (B, num_draws) below 2^31.

    Args:
        path: of a ``.npy`` file with all images; each process maps it for itself.
        rows: positions in it, shape (N,).
        labels: shape (N,), or ``None``.
        file_names: a column of prediction tables; empty leaves it out.
        num_draws: random numbers for each image; 0 for no augmentation.
        seed: decides, with the epoch and the image, which numbers these are.
    """

    def __init__(
        self,
        path: Path,
        rows: NDArray[np.int64],
        labels: NDArray[np.int64] | None,
        file_names: Sequence[str] = (),
        num_draws: int = 0,
        seed: int = 0,
    ) -> None:
        self.path, self.rows = path, rows
        self.labels = None if labels is None else torch.from_numpy(labels)
        self.sample_columns = {"file": file_names} if file_names else {}
        self.num_draws, self.seed = num_draws, seed

    @cached_property
    def pixels(self) -> NDArray[np.uint8]:
        """All images, mapped: a plain array is read faster than NumPy's memmap."""
        return np.asarray(np.load(self.path, mmap_mode="r"))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "pixels"}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Any:
        """Read a batch."""
        images = torch.from_numpy(np.take(self.pixels, self.rows[indices], axis=0))
        if self.labels is None:
            return images
        labels = self.labels[torch.tensor(indices)]
        if not self.num_draws:
            return images, labels
        epoch = indices.epoch if isinstance(indices, Batch) else 0
        draws = uniform(self.seed, epoch, indices, self.num_draws)
        # As integers below 2^31, which no precision of a run rounds on the way to the device.
        return images, labels, torch.from_numpy((draws * 2.0**31).astype(np.int32))


class Images(SplitDataModule):
    """Class folders of images; what no folder splits is split by class.

    Args:
        root: the folder.
        predict_root: images at any depth to predict on; ``None`` takes the test split.
        size: side of the squares that the network sees, in pixels.
        packed_size: side of the decoded squares, of which training draws crops and evaluation takes
            the middle; ``None`` is an eighth part of ``7 * size`` larger.
        channels: 1 for grey, 3 for colours.
        mean: of each channel's values in [0, 1], for normalisation; ``None`` takes ImageNet's.
        std: their standard deviation; ``None`` takes ImageNet's.
        unreadable: whether files that cannot be decoded are refused or skipped.
        cache_dir: where decoded images are kept.
        flip: whether half of the training images are mirrored.
        crop_scale: least and largest share of the area that a training crop keeps.
        color_jitter: most that brightness, contrast and saturation change by in training.
        **kwargs: see ``SplitDataModule``.
    """

    def __init__(
        self,
        root: str,
        predict_root: str | None = None,
        size: int = 224,
        packed_size: int | None = None,
        channels: Literal[1, 3] = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        unreadable: Literal["refuse", "skip"] = "refuse",
        cache_dir: str = ".cache",
        flip: bool = True,
        crop_scale: Sequence[float] = (0.35, 1.0),
        color_jitter: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.root, self.predict_root, self.cache_dir = Path(root), predict_root, Path(cache_dir)
        self.size, self.packed_size = size, packed_size or round(size * 8 / 7)
        self.channels, self.skips_unreadable = channels, unreadable == "skip"
        self.mean = tuple(mean or (MEAN if channels == 3 else GREY_MEAN))
        self.std = tuple(std or (STD if channels == 3 else GREY_STD))
        if self.packed_size < size:
            raise UserError(f"data.packed_size={packed_size} must be at least data.size={size}.")
        if channels not in (1, 3) or not len(self.mean) == len(self.std) == channels:
            raise UserError(f"data.channels={channels}: use 1 or 3, with as many mean and std.")
        self.augmented = partial(augment, scale=crop_scale, flip=flip, jitter=color_jitter)

    def packed(self, root: Path, names: Sequence[str], key: str) -> tuple[Path, list[str]]:
        """Decode files once; return the folder of the result, and the names that are unreadable."""
        status = [os.stat(root / name) for name in names]
        settings = [VERSION, self.packed_size, self.channels, [*names]]
        text = json.dumps([settings, [(s.st_size, s.st_mtime_ns) for s in status]])
        name = f"{root.resolve().name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        make = partial(decode_all, root, names, self.packed_size, self.channels)
        folder = cached(self.cache_dir / name, make)
        unreadable = json.loads((folder / "unreadable.json").read_text())
        if unreadable:
            shown = "; ".join(f"{file}: {why}" for file, why in [*unreadable.items()][:5])
            counts = f"{len(unreadable):,} of {len(names):,} files"
            said = f"{key}={root}: {counts} cannot be read: {shown}"
            if not self.skips_unreadable or len(unreadable) == len(names):
                raise UserError(f"{said}.\nMend them, or leave them out: data.unreadable=skip")
            self.say(f"{said} (skipped)")
        return folder / "pixels.npy", [*unreadable]

    @cached_property
    def found(self) -> dict[str, Any]:
        """Files with class and split, where their pixels are, and the rows of each split."""
        names, classes, splits = labelled(find_images(self.root, "data.root"), self.root)
        path, unreadable = self.packed(self.root, names, "data.root")
        rows = np.flatnonzero(~np.isin(names, unreadable))
        class_names = sorted(set(classes))
        codes = np.searchsorted(class_names, classes)
        given = {split: rows[np.array(splits)[rows] == split] for split in sorted({*splits} - {""})}
        if self.fold is not None and "test" in given:
            raise UserError(
                f"data.fold={self.fold} draws the test split, and data.root={self.root} has a "
                "folder of it.\nLeave out data.fold, or give one folder of classes as data.root."
            )
        drawn = rows if not given else given.get("train", rows[:0])
        if not given or ("train" in given and len(given) < 3):
            parts = self.split(len(drawn), codes[drawn], class_names)
            used = [split for split in ("val", "test") if split not in given]
            given |= {split: drawn[parts[split]] for split in used}
            given["train"] = np.setdiff1d(drawn, np.concatenate([given[s] for s in used]))
        counts = ", ".join(f"{split} {len(part):,}" for split, part in given.items())
        self.say(
            f"data.root={self.root}: {len(rows):,} images, {len(class_names)} classes; {counts}"
        )
        checksum = hashlib.sha256(json.dumps([names[row] for row in drawn]).encode()).hexdigest()
        return {
            "names": names,
            "codes": codes,
            "class_names": class_names,
            "path": path,
            "rows": given,
            "checksum": checksum[:16],
        }

    def learn(self) -> dict[str, Any]:
        """Names of the classes, and sizes; all images are decoded on this occasion."""
        found = self.found
        rows = found["rows"].get("train", np.arange(len(found["names"])))
        names = [found["class_names"][code] for code in np.unique(found["codes"][rows])]
        if len(names) < 2:
            raise UserError(
                f"data.root={self.root} has one class, {names[0]}: each class needs a folder."
            )
        for split in found["rows"]:
            self.labels(split, names)  # a class that training lacks is refused before it begins
        return {
            "num_classes": len(names),
            "class_names": names,
            "in_channels": self.channels,
            "image_size": self.size,
            "drawn_from": self.drawn_from(found["checksum"]),
        }

    def labels(self, split: str, class_names: list[str]) -> NDArray[np.int64]:
        """The classes of a split, as positions in the names that training knows."""
        classes = np.array(self.found["class_names"])[
            self.found["codes"][self.found["rows"][split]]
        ]
        if unknown := sorted({*classes.tolist()} - {*class_names}):
            raise UserError(
                f"data.root={self.root}: the {split} images have the classes "
                f"{', '.join(unknown[:5])}, which training does not have."
            )
        codes = {name: code for code, name in enumerate(class_names)}
        return np.array([codes[name] for name in classes], dtype=np.int64)

    def make_dataset(self, split: str) -> ImageDataset:
        """The images of one split; predictions are made on those of the test, or of a folder."""
        if split == "predict" and self.predict_root is not None:
            root = Path(self.predict_root)
            names = find_images(root, "data.predict_root")
            path, unreadable = self.packed(root, names, "data.predict_root")
            rows = np.flatnonzero(~np.isin(names, unreadable))
            return ImageDataset(path, rows, None, [names[row] for row in rows])
        part = "test" if split == "predict" else split
        if part not in self.found["rows"]:
            raise UserError(f"data.root={self.root} has no folder {part}, and none named train.")
        if part == "test":
            self.warn_if_changed(self.found["checksum"])
        rows, labels = self.found["rows"][part], self.labels(part, self.facts["class_names"])
        names = [self.found["names"][row] for row in rows] if split == "predict" else []
        num_draws = NUM_DRAWS if split == "train" and self.augment else 0
        return ImageDataset(self.found["path"], rows, labels, names, num_draws, self.seed)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Turn bytes into what the network sees, on its device.

        Returns:
            Images (B, channels, size, size), normalised, with labels (B,) if there are any.
        """
        images, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        convert = self.trainer.precision_plugin.convert_input  # type: ignore[union-attr]
        dtype = torch.promote_types(convert(torch.empty(0)).dtype, torch.float32)
        images = images.movedim(3, 1).to(dtype) / 255  # (B, C, side, side)
        if len(others) == 2:
            images = self.augmented(images, others[1].to(dtype) / 2**31, self.size)
        else:
            low = (self.packed_size - self.size) // 2
            images = images[:, :, low : low + self.size, low : low + self.size]
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.mean, self.std))
        # Contiguous: with channels last, oneDNN's strided 1x1 convolutions of few channels write
        # past their memory (oneDNN #6035).
        images = convert((images - mean) / std).contiguous()
        return (images, *others[:1]) if others else images
