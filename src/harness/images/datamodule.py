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

from harness.data.datamodule import DataModule
from harness.data.splits import split_positions
from harness.errors import UserError
from harness.images.augmentation import KINDS, Augmentation
from harness.images.cache import Packed, packed
from harness.images.dataset import FilePixels, ImageDataset, PackedPixels
from harness.images.finding import Files, Labelled, find_files, label, listed
from harness.processes.launch import global_rank

log = logging.getLogger(__name__)

SPLITS = ("train", "val", "test")
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
        augmentation: of training images: ``"none"``, ``"crop"``, ``"standard"``,
            ``"randaugment"``; see ``Augmentation``, also for the five settings that follow.
        flip: whether half of them are mirrored.
        crop_scale: least and largest share of the area that a crop keeps.
        color_jitter: most that colours change by.
        randaugment_ops: operations on each image.
        randaugment_magnitude: how strong they are, from 0 to 30.
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
        randaugment_ops: int = 2,
        randaugment_magnitude: float = 9,
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
            num_ops=randaugment_ops,
            magnitude=randaugment_magnitude,
        )
        self._check_settings()

    def _check_settings(self) -> None:
        low, high = self.augmentation.crop_scale
        jitter, magnitude = self.augmentation.color_jitter, self.augmentation.magnitude
        kind, num_ops = self.augmentation.kind, self.augmentation.num_ops
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
            ("randaugment_ops", num_ops, num_ops >= 1, "1 or more"),
            ("randaugment_magnitude", magnitude, 0 <= magnitude <= 30, "from 0 to 30"),
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
        _ = self.rows  # before processes are started, which would wait for each other
        return {
            "num_classes": len(names),
            "class_names": names,
            "in_channels": self.channels,
            "image_size": self.size,
            "split_of": self.split_of,
        }

    @cached_property
    def found(self) -> Labelled:
        """The files below ``root``, told once."""
        found = label(find_files(self.root, "data.root"), "data.root")
        counts = [f"{name} {num:,}" for name, num in found.counts().items()]
        num_files = len(found.files.names)
        tell(f"data.root={self.root}: {num_files:,} images, {len(counts)} classes")
        tell(f"  {listed(counts)}")
        if found.files.left_out:
            tell_left_out(found.files)
        return found

    @cached_property
    def packed(self) -> Packed:
        """The files of ``root``, decoded once."""
        self._split(np.arange(len(self.found.files.names)))  # what is refused, is before an hour
        return self._pack(self.found.files, "data.root")

    def _pack(self, files: Files, key: str) -> Packed:
        """Decode files, or take what an earlier run has decoded; tell of those that cannot be."""
        found = packed(
            files, self.cache_dir, self.packed_size, self.channels, keeps_pixels=self.cache
        )
        if found.unreadable:
            reasons = [f"{files.names[i]}: {text}" for i, text in found.unreadable.items()]
            num, num_files = len(reasons), len(files.names)
            said = f"{num:,} of {num_files:,} files below {key}={files.root} cannot be read"
            if self.unreadable == "refuse" or num == num_files:
                raise UserError(
                    f"{said}: {listed(reasons, 5)}.\n"
                    "Repair or remove them, or leave them out with data.unreadable=skip."
                )
            tell(f"{said}, and are skipped: {listed(reasons, 5)}")
            for text in reasons:
                log.info("skipped %s", listed([text]))
        return found

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """Positions of the files of each split."""
        is_readable = np.ones(len(self.found.files.names), dtype=bool)
        is_readable[list(self.packed.unreadable)] = False
        rows = self._split(np.flatnonzero(is_readable))
        tell("  " + ", ".join(f"{split} {len(rows[split]):,}" for split in SPLITS if split in rows))
        return rows

    def _split(self, rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        """Split files as folders do, and by class what folders do not."""
        classes, splits = self.found.classes[rows], self.found.splits[rows]
        given = {split: rows[splits == split] for split in SPLITS if (splits == split).any()}
        whole = "train" if "train" in given else ""
        missing = [split for split in SPLITS if split not in given]
        if given and ("train" in missing or not missing):
            if self.fold is not None:
                self._refuse_fold(given)
            return given  # of a folder that is tested alone, train is missing
        if self.fold is not None and "test" in given:
            self._refuse_fold(given)
        of_whole = splits == whole
        parts = split_positions(
            int(of_whole.sum()),
            val_fraction=self.val_fraction,
            test_fraction=self.test_fraction if "test" in missing else self.val_fraction,
            seed=self.split_seed,
            classes=classes[of_whole],
            class_names=self.found.class_names,
            fold=self.fold,
            num_folds=self.num_folds,
        )
        # What a folder has beside train is not split off a second time.
        stays = [parts[split] for split in SPLITS if split == "train" or split in given]
        drawn = {split: rows[of_whole][parts[split]] for split in missing}
        return given | drawn | {"train": rows[of_whole][np.sort(np.concatenate(stays))]}

    def _refuse_fold(self, given: dict[str, Any]) -> None:
        raise UserError(
            f"data.fold={self.fold} splits one folder of classes, and data.root={self.root} is "
            f"split into {', '.join(given)} already.\nLeave out data.fold, or give "
            f"data.root={Path(self.root, 'train')}."
        )

    @cached_property
    def split_of(self) -> str:
        """A hash of the files that a split was drawn from; empty where folders split them."""
        files = self.found.files
        is_split = {*SPLITS} <= {*self.found.splits.tolist()} or "train" not in self.rows
        names = [name for i, name in enumerate(files.names) if i not in self.packed.unreadable]
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]
        return "" if is_split else digest

    def make_dataset(self, split: str) -> ImageDataset:
        """The images of one split; predictions are made on those of the test, or of a folder."""
        if split == "predict" and self.predict_root is not None:
            files = find_files(self.predict_root, "data.predict_root")
            tell(f"data.predict_root={self.predict_root}: {len(files.names):,} images")
            if files.left_out:
                tell_left_out(files)
            found = self._pack(files, "data.predict_root")
            rows = np.array([i for i in range(len(files.names)) if i not in found.unreadable])
            names = [files.names[i] for i in rows]
            return ImageDataset(self._pixels(files, found), rows, None, sample_names=names)
        of = "test" if split == "predict" else split
        if of not in self.rows:
            raise UserError(
                f"data.root={self.root} has folders for {', '.join(self.rows)}, and none for {of}."
            )
        rows, files = self.rows[of], self.found.files
        is_trained = split == "train" and self.augment and self.augmentation.kind != "none"
        if of == "test" and self.split_of != self.facts.get("split_of", self.split_of):
            log.warning(
                "The files of data.root=%s are others than in training: the test split that is "
                "drawn from them may hold images that were trained on.",
                self.root,
            )
        return ImageDataset(
            self._pixels(files, self.packed),
            rows,
            self._labels(rows),
            num_draws=self.augmentation.num_draws if is_trained else 0,
            seed=self.seed,
            sample_names=[files.names[i] for i in rows] if split == "predict" else (),
            sizes=np.array(files.sizes)[rows],
        )

    def _labels(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels as in training, whatever classes are there now."""
        known = {name: i for i, name in enumerate(self.facts["class_names"])}
        here = self.found.class_names
        used = np.unique(self.found.classes[rows]).tolist()
        if unknown := [here[i] for i in used if here[i] not in known]:
            raise UserError(
                f"data.root={self.root} has images of {listed(unknown, 5)}, which training did not "
                f"have.\nIts classes are {listed(known)}."
            )
        labels = np.array([known.get(name, -1) for name in here], dtype=np.int64)
        return labels[self.found.classes[rows]]

    def _pixels(self, files: Files, found: Packed) -> PackedPixels | FilePixels:
        shape = (self.packed_size, self.packed_size, self.channels)
        if found.path is None:
            return FilePixels(files.root, files.names, shape)
        return PackedPixels(found.path, shape)

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
        images = convert((images - mean) / std)
        return (images, *labels) if labels else images


def tell(line: str) -> None:
    """Say something about the data once, on the screen and in the log."""
    log.info("%s", line)
    if global_rank() == 0:
        print(line, flush=True)


def tell_left_out(files: Files) -> None:
    """Say what lies below a folder and is not read."""
    tell(f"  left out: {listed(f'{num:,} {what}' for what, num in files.left_out.items())}")
