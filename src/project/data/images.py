"""Class folders of images: ``root/<class>/...`` or ``root/{train,val,test}/<class>/...``.

In: image files. Each file is decoded once, to a square in one uint8 array below ``cache_dir``,
which every process maps. Out: batches of uint8 images, which are augmented and normalised on the
training device. This file is yours: change it for your data.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from harness import BatchedDataset, SplitDataModule, UserError, cached, uniform
from project.data.image_files import decode_all, find_images, read_folders

VERSION = 1  # of the decoded images: if you change ``decode``, raise it to decode images again
MARGIN = 8 / 7  # side of the decoded squares divided by ``size``; a margin for training crops
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for pretrained networks
GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue in the brightness
NUM_DRAWS = 8  # random numbers for each image: 4 for its crop, 1 for a flip, 3 for colours


def augment(
    images: Tensor, draws: Tensor, size: int, *, scale: Sequence[float], flip: bool, jitter: float
) -> Tensor:
    """Crop, mirror and recolour each image with its own random numbers.

    Args:
        images: values in [0, 1], shape (B, 3, H, W).
        draws: numbers in [0, 1), shape (B, NUM_DRAWS).
        size: side of the returned squares, in pixels.
        scale: smallest and largest fraction of the area that a crop keeps.
        flip: whether to mirror half of the images.
        jitter: largest relative change of brightness, contrast and saturation.

    Returns:
        Shape (B, 3, size, size).
    """
    area, ratio, x, y, mirrored = draws[:, :5].T
    area = scale[0] + (scale[-1] - scale[0]) * area
    ratio = torch.exp((2 * ratio - 1) * math.log(4 / 3) / 2)  # square root of width by height
    width, height = (area.sqrt() * ratio).clamp(max=1), (area.sqrt() / ratio).clamp(max=1)
    sign = torch.where(mirrored < 0.5, -1.0, 1.0) if flip else 1.0
    # Affine maps from coordinates of the result to coordinates of the image, both from -1 to 1.
    theta = draws.new_zeros(len(draws), 2, 3)
    theta[:, 0, 0], theta[:, 0, 2] = width * sign, (2 * x - 1) * (1 - width)
    theta[:, 1, 1], theta[:, 1, 2] = height, (2 * y - 1) * (1 - height)
    grid = F.affine_grid(theta, [*images.shape[:2], size, size], align_corners=False)
    images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    weights = per_channel(GREY, images.device)
    for kind, draw in enumerate(draws[:, 5:].T if jitter else ()):
        factor = (1 + jitter * (2 * draw - 1))[:, None, None, None]
        grey = (images * weights).sum(1, keepdim=True)
        reference = (0 * grey, grey.mean((2, 3), keepdim=True), grey)[kind]
        images = (factor * images + (1 - factor) * reference).clamp(0, 1)
    return images


@lru_cache  # a copy to a GPU synchronises: once per device instead of at each step
@torch.inference_mode(False)
def per_channel(values: Sequence[float], device: torch.device) -> Tensor:
    """Return one value per channel as a tensor, shape (C, 1, 1)."""
    return torch.tensor(values, device=device)[:, None, None]


@lru_cache
def map_pixels(path: Path) -> NDArray[np.uint8]:
    """Map all images in this process, as an array that is faster to read than np.memmap."""
    return np.asarray(np.load(path, mmap_mode="r"))


class ImageDataset(BatchedDataset):
    """Images with their classes, read as whole batches.

    A batch is (images, labels). In training it is (images, labels, draws), and without labels it is
    the images. Shapes: uint8 images (B, side, side, 3), labels (B,), draws (B, NUM_DRAWS) below
    2^31.

    Args:
        path: a ``.npy`` file with all images; each process maps it.
        rows: indices of the images in the file, shape (N,).
        labels: classes, shape (N,), or ``None``.
        file_names: a column of prediction tables.
        seed: seed of the random numbers for augmentation; ``None`` draws none.
    """

    def __init__(
        self,
        path: Path,
        rows: NDArray[np.int64],
        labels: NDArray[np.int64] | None = None,
        file_names: Sequence[str] = (),
        seed: int | None = None,
    ) -> None:
        self.path, self.rows, self.labels, self.seed = path, rows, labels, seed
        self.sample_columns = {"file": file_names} if file_names else {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> Any:
        """Read a batch."""
        images = torch.from_numpy(np.take(map_pixels(self.path), self.rows[indices], axis=0))
        if self.labels is None:
            return images
        labels = torch.from_numpy(self.labels[indices])
        if self.seed is None:
            return images, labels
        draws = uniform(self.seed, self.epoch_of(indices), indices, NUM_DRAWS)
        # As integers, because a run with low precision would round floats on the way to the device.
        return images, labels, torch.from_numpy((draws * 2.0**31).astype(np.int32))


class Images(SplitDataModule):
    """Class folders of images; splits without a folder are drawn, stratified by class.

    Args:
        root: the folder.
        predict_root: a folder of images, at any depth, to predict on; ``None`` predicts on the test
            split.
        size: side of the network's square inputs, in pixels.
        cache_dir: folder for decoded images.
        flip: whether to mirror half of the training images.
        crop_scale: smallest and largest fraction of the area that a training crop keeps.
        color_jitter: largest relative change of brightness, contrast and saturation in training.
        **kwargs: see ``SplitDataModule``.
    """

    def __init__(
        self,
        root: str,
        predict_root: str | None = None,
        size: int = 224,
        cache_dir: str = ".cache",
        flip: bool = True,
        crop_scale: Sequence[float] = (0.35, 1.0),
        color_jitter: float = 0.2,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.root, self.predict_root, self.cache_dir = Path(root), predict_root, Path(cache_dir)
        self.size, self.side = size, round(size * MARGIN)
        self.augmentation: dict[str, Any] = {
            "scale": crop_scale,
            "flip": flip,
            "jitter": color_jitter,
        }

    def decoded(self, key: str, root: Path, names: Sequence[str]) -> tuple[Path, list[str]]:
        """Decode files once; return the array's file and the names of unreadable images."""
        files = (os.stat(os.path.join(root, name)) for name in names)
        status = [(file.st_size, file.st_mtime_ns) for file in files]
        settings = json.dumps([VERSION, self.side, [*names], status])
        name = f"{root.resolve().name}-{hashlib.sha256(settings.encode()).hexdigest()[:16]}"
        folder = cached(self.cache_dir / name, partial(decode_all, root, names, self.side))
        unreadable = json.loads((folder / "unreadable.json").read_text())
        if unreadable:
            reasons = "; ".join(f"{file}: {why}" for file, why in [*unreadable.items()][:5])
            counts = f"{len(unreadable):,} of {len(names):,} files"
            message = f"{key}={root}: {counts} cannot be read and are left out: {reasons}"
            if len(unreadable) == len(names):
                raise UserError(message)
            self.say(message)
        return folder / "pixels.npy", [*unreadable]

    @cached_property
    def found(self) -> dict[str, Any]:
        """Files with their classes, the file of decoded images, and each split's rows in it."""
        names, classes, folders = read_folders(find_images(self.root, "data.root"), self.root)
        path, unreadable = self.decoded("data.root", self.root, names)
        splits = np.where(np.isin(names, unreadable), "unreadable", folders)
        rows = {name: np.flatnonzero(splits == name) for name in ("train", "val", "test")}
        if self.fold is not None and len(rows["test"]):
            raise UserError(
                f"data.fold={self.fold} draws the test split, but {self.root} has a test folder.\n"
                "Leave out data.fold, or move the images of the test folder to train."
            )
        drawn = np.flatnonzero(np.isin(splits, ("", "train")))  # rows to draw missing splits from
        missing = [name for name in ("val", "test") if not len(rows[name])]
        if len(drawn) and missing:
            class_names, codes = np.unique(np.array(classes)[drawn], return_inverse=True)
            parts = self.split(len(drawn), codes, class_names.tolist())
            rows |= {name: drawn[parts[name]] for name in missing}
            rows["train"] = np.setdiff1d(drawn, np.concatenate([rows[name] for name in missing]))
        counts = ", ".join(f"{name} {len(part):,}" for name, part in rows.items())
        self.say(f"data.root={self.root}: {len({*classes})} classes; images: {counts}")
        if self.augment:
            smallest, largest = self.augmentation["scale"]
            flips = ", flips" * self.augmentation["flip"]
            crops = f"crops of {smallest:.0%} to {largest:.0%} of the area{flips}"
            self.say(f"training images: {crops}, colors ±{self.augmentation['jitter']:.0%}")
        checksum = hashlib.sha256(json.dumps([names[row] for row in drawn]).encode()).hexdigest()
        return {
            "path": path,
            "names": np.array(names),
            "classes": np.array(classes),
            "rows": rows,
            "checksum": checksum[:16],
        }

    def infer_facts(self) -> dict[str, Any]:
        """Decode all images, and return the names and the number of the classes."""
        names = np.unique(self.found["classes"][self.found["rows"]["train"]]).tolist()
        if len(names) < 2:
            raise UserError(
                f"data.root={self.root} has training images of {len(names)} class, but at least "
                "two are needed.\nMake a folder of images for each class."
            )
        for split in ("val", "test"):
            self.labels(split, names)  # raises before training if training lacks a class
        facts = {"num_classes": len(names), "class_names": names, "in_channels": 3}
        return facts | {"drawn_from": self.drawn_from(self.found["checksum"])}

    def labels(self, split: str, class_names: list[str]) -> NDArray[np.int64]:
        """Return the classes of a split, as indices into the sorted names of training classes."""
        classes: NDArray[np.str_] = self.found["classes"][self.found["rows"][split]]
        if unknown := sorted({*classes.tolist()} - {*class_names}):
            raise UserError(
                f"data.root={self.root}: the {split} images have the classes "
                f"{', '.join(unknown[:5])}, which the training images do not have.\n"
                "Add training images of these classes, or remove their images."
            )
        return np.searchsorted(np.array(class_names), classes)

    def make_dataset(self, split: str) -> ImageDataset:
        """Make the data set of a split; predict.py reads ``predict_root`` or the test split."""
        if split == "predict" and self.predict_root is not None:
            root = Path(self.predict_root)
            files = find_images(root, "data.predict_root")
            path, unreadable = self.decoded("data.predict_root", root, files)
            rows = np.flatnonzero(~np.isin(files, unreadable))
            return ImageDataset(path, rows, None, [files[row] for row in rows])
        part = "test" if split == "predict" else split
        if part == "test":
            self.warn_if_changed(self.found["checksum"])
        labels, rows = self.labels(part, self.facts["class_names"]), self.found["rows"][part]
        names = self.found["names"][rows].tolist() if split == "predict" else []
        seed = self.seed if split == "train" and self.augment else None
        return ImageDataset(self.found["path"], rows, labels, names, seed)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Crop or augment, and normalise uint8 images on the device.

        Returns:
            Images (B, 3, size, size), with labels (B,) if the batch has labels.
        """
        images, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        images = images.movedim(3, 1).float() / 255  # (B, 3, side, side)
        if len(others) == 2:
            images = augment(images, others[1].float() / 2**31, self.size, **self.augmentation)
        else:
            low = (self.side - self.size) // 2
            images = images[:, :, low : low + self.size, low : low + self.size]
        mean, std = (per_channel(values, images.device) for values in (MEAN, STD))
        convert = self.trainer.precision_plugin.convert_input  # type: ignore[union-attr]
        # Contiguous, because with channels last oneDNN's strided 1x1 convolutions of few channels
        # write past their memory (oneDNN #6035).
        images = convert((images - mean) / std).contiguous()
        return (images, *others[:1]) if others else images
