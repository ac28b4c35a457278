import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harness.data.datamodule import DataModule, tell
from harness.errors import UserError
from harness.images.augmentation import KINDS, NUM_DRAWS, Augmentation
from harness.images.dataset import ImageDataset
from harness.images.finding import Labelled, label, listed
from harness.images.source import Source
from harness.images.splitting import SPLITS, split_rows

log = logging.getLogger(__name__)

WAYS = ("refuse", "skip")
MARGIN = 8 / 7  # of packed images around the crop: 256 pixels for 224
# Of ImageNet, which most pretrained networks expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GREY_MEAN, GREY_STD = (0.449,), (0.226,)


class Images(DataModule):
    """Class folders of images: ``root/<class>/...``, or ``root/{train,val,test}/<class>/...``.

    What folders do not split is split by class: all of it, or what is missing from ``train``. Each
    file is decoded once, to a square a little larger than what is trained on; batches are gathered
    as bytes, and become augmented, normalised numbers on the device that trains.

    Args:
        root: the folder.
        predict_root: a folder of images at any depth to predict on; ``None`` takes the test split.
        size: side of the squares that the network sees, in pixels.
        packed_size: side of the squares that are kept, of which training draws crops and
            evaluation takes the middle; ``None`` is an eighth part of ``7 * size`` larger.
        channels: 1 for grey, 3 for colours.
        mean: of each channel's values in [0, 1], for normalisation; ``None`` takes ImageNet's.
        std: their standard deviation; ``None`` takes ImageNet's.
        unreadable: whether files that cannot be decoded are refused or skipped.
        cache: whether decoded images are kept on the disk; without, workers decode them anew.
        cache_dir: where.
        val_fraction: share of the images for validation, where no folder has them.
        test_fraction: share for the test, where no folder has them.
        split_seed: decides which images; independent of the run's seed, so that runs compare.
        fold: of k-fold cross-validation; see ``split_positions``.
        num_folds: how many there are.
        augmentation: of training images: ``"none"``, ``"crop"``, ``"standard"``; see
            ``Augmentation``, also for the three settings that follow.
        flip: whether half of them are mirrored.
        crop_scale: least and largest share of the area that a crop keeps.
        color_jitter: most that colours change by.
        num_workers: ``None`` is 0 with the cache, and ``"auto"`` without.
        **kwargs: see ``DataModule``.
    """

    def __init__(
        self,
        root: str,
        predict_root: str | None = None,
        size: int = 224,
        packed_size: int | None = None,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        unreadable: Literal["refuse", "skip"] = "refuse",
        cache: bool = True,
        cache_dir: str = ".cache",
        val_fraction: float = 0.1,
        test_fraction: float = 0.2,
        split_seed: int = 0,
        fold: int | None = None,
        num_folds: int = 5,
        augmentation: str = "standard",
        flip: bool = True,
        crop_scale: Sequence[float] = (0.35, 1.0),
        color_jitter: float = 0.2,
        num_workers: int | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        if num_workers is None:
            num_workers = 0 if cache else "auto"
        super().__init__(num_workers=num_workers, **kwargs)
        self.root, self.predict_root = root, predict_root
        self.size, self.packed_size = size, packed_size or round(size * MARGIN)
        self.channels = channels
        self.mean = tuple(mean or (MEAN if channels == 3 else GREY_MEAN))
        self.std = tuple(std or (STD if channels == 3 else GREY_STD))
        self.unreadable = unreadable
        self.cache, self.cache_dir = cache, Path(cache_dir).expanduser()
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.split_seed, self.fold, self.num_folds = split_seed, fold, num_folds
        self.augmentation = Augmentation(
            kind=augmentation,
            flip=flip,
            crop_scale=(float(crop_scale[0]), float(crop_scale[-1])),
            color_jitter=color_jitter,
        )
        self._check_settings()

    def _check_settings(self) -> None:
        low, high = self.augmentation.crop_scale
        jitter, kind = self.augmentation.color_jitter, self.augmentation.kind
        size, packed_size, channels = self.size, self.packed_size, self.channels
        is_fitting = len(self.mean) == len(self.std) == channels and min(self.std) > 0
        for key, value, is_right, wanted in (
            ("size", size, size >= 1, "1 or more pixels"),
            ("packed_size", packed_size, packed_size >= size, f"at least data.size={size}"),
            ("channels", channels, channels in (1, 3), "1 for grey or 3 for colours"),
            ("mean", [*self.mean], is_fitting, f"{channels} numbers, as data.std, all above 0"),
            ("unreadable", self.unreadable, self.unreadable in WAYS, " or ".join(WAYS)),
            ("augmentation", kind, kind in KINDS, f"one of {', '.join(KINDS)}"),
            ("crop_scale", [low, high], 0 < low <= high <= 1, "shares above 0 and up to 1"),
            ("color_jitter", jitter, 0 <= jitter <= 1, "from 0 to 1"),
        ):
            if not is_right:
                raise UserError(f"data.{key}={value} must be {wanted}.")

    def learn(self) -> dict[str, Any]:
        """Sizes and names of classes; the images are packed on this occasion."""
        names = self.found.class_names
        if "train" in self.found.splits:
            of_train = np.unique(self.found.classes[self.found.splits == "train"])
            names = [names[i] for i in of_train]
        if len(names) < 2:
            raise UserError(
                f"data.root={self.root} has one class, {names[0]}: there is nothing to tell apart."
                "\nIt needs a folder for each class."
            )
        # Before processes are started, which would wait for each other.
        for split, rows in self.rows.items():
            missing = {*names} - {self.found.class_names[i] for i in np.unique(self._classes(rows))}
            self._labels(rows, {name: i for i, name in enumerate(names)})
            if missing and split == "train":
                raise UserError(
                    f"data.root={self.root}: no image of {listed(sorted(missing), 5)} can be "
                    "trained on.\nRepair its files, or remove its folder."
                )
            if missing:
                log.warning("The %s images have none of %s.", split, listed(sorted(missing), 5))
        return {
            "num_classes": len(names),
            "class_names": names,
            "in_channels": self.channels,
            "image_size": self.size,
            "drawn_from": self.drawn_from,
        }

    def _source(self, root: str, key: str) -> Source:
        return Source(
            root,
            key,
            cache_dir=self.cache_dir,
            shape=(self.packed_size, self.packed_size, self.channels),
            keeps_pixels=self.cache,
            skips=self.unreadable == "skip",
        )

    @cached_property
    def source(self) -> Source:
        """The images below ``root``."""
        return self._source(self.root, "data.root")

    @cached_property
    def found(self) -> Labelled:
        """Their classes, told once."""
        found = label(self.source.files, "data.root")
        self.source.tell_files(f", {len(found.class_names):,} classes")
        tell(f"  {listed(f'{name} {num:,}' for name, num in found.counts().items())}")
        return found

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Positions of the images of each split."""

        def split(rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
            return split_rows(
                self.found,
                rows,
                val_fraction=self.val_fraction,
                test_fraction=self.test_fraction,
                seed=self.split_seed,
                fold=self.fold,
                num_folds=self.num_folds,
            )

        split(np.arange(len(self.found.classes)))  # what cannot be split is refused before packing
        rows = split(self.source.readable)
        tell("  " + ", ".join(f"{name} {len(rows[name]):,}" for name in SPLITS if name in rows))
        return rows

    @property
    def split_rows(self) -> dict[str, NDArray[np.int64]]:
        """Positions of the images of each split, by which folds are joined."""
        return self.rows

    @cached_property
    def drawn_from(self) -> str:
        """A hash of the files that the test was drawn from; empty where folders split them."""
        if "train" not in self.rows or {*SPLITS} <= {*self.found.splits.tolist()}:
            return ""
        names = [self.source.files.names[i] for i in self.source.readable]
        return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]

    def make_dataset(self, split: str) -> ImageDataset:
        """The images of one split; predictions are made on those of the test, or of a folder."""
        if split == "predict" and self.predict_root is not None:
            source = self._source(self.predict_root, "data.predict_root")
            source.tell_files()
            names = [source.files.names[i] for i in source.readable]
            return ImageDataset(source.pixels, source.readable, None, sample_names=names)
        of = "test" if split == "predict" else split
        if of not in self.rows:
            raise UserError(
                f"data.root={self.root} has folders of {', '.join(self.rows)}, and none of {of}."
            )
        before = self.facts.get("drawn_from", self.drawn_from)
        if of == "test" and self.drawn_from not in ("", before):
            log.warning(
                "The images below data.root=%s are others than in training, and so is the split: "
                "the test may be on images that were trained on.",
                self.root,
            )
        rows, files = self.rows[of], self.source.files
        is_augmented = split == "train" and self.augment and self.augmentation.kind != "none"
        return ImageDataset(
            self.source.pixels,
            rows,
            self._labels(rows, {name: i for i, name in enumerate(self.facts["class_names"])}),
            num_draws=NUM_DRAWS if is_augmented else 0,
            seed=self.seed,
            sample_names=[files.names[i] for i in rows] if split == "predict" else (),
            checksums=np.array(self.source.packed.checksums)[rows],
        )

    def _classes(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions in today's ``class_names``."""
        return self.found.classes[rows]

    def _labels(self, rows: NDArray[np.int64], known: dict[str, int]) -> NDArray[np.int64]:
        """Labels as in training, whatever classes are there now."""
        here = self.found.class_names
        used = np.unique(self._classes(rows)).tolist()
        if unknown := [here[i] for i in used if here[i] not in known]:
            raise UserError(
                f"data.root={self.root} has images of {listed(unknown, 5)}, which training did not "
                f"have.\nIts classes are {listed(known)}."
            )
        labels = np.array([known.get(name, -1) for name in here], dtype=np.int64)
        return labels[self._classes(rows)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Turn bytes into what a network sees, on its device.

        Args:
            batch: of ``ImageDataset``; one with draws is of training.
            dataloader_idx: not looked at.

        Returns:
            Images (B, channels, size, size), normalised, with their labels (B,) if there are any.
        """
        images, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        if not isinstance(images, Tensor) or images.dtype != torch.uint8:
            return batch  # of another loader
        images = images.movedim(3, 1)  # (B, C, side, side), channels last in memory
        # 64 bits where the run has them; what is narrower than 32 is too coarse for places.
        convert = self.trainer.precision_plugin.convert_input  # type: ignore[union-attr]
        dtype = convert(torch.empty(0)).dtype
        dtype = dtype if dtype == torch.float64 else torch.float32
        labels = others[:1]
        if len(others) == 2:
            images = self.augmentation(images.to(dtype) / 255, others[1], self.size)
        else:
            low = (self.packed_size - self.size) // 2
            images = images[:, :, low : low + self.size, low : low + self.size].to(dtype) / 255
        mean, std = (
            torch.tensor(values, dtype=dtype).to(images.device)[:, None, None]
            for values in (self.mean, self.std)
        )
        # In torch's own order: what is channels-last goes on so through any network, and where a
        # strided 1x1 convolution has few channels, oneDNN then writes past its memory (its #6035).
        images = convert((images - mean) / std).contiguous()
        return (images, *labels) if labels else images
