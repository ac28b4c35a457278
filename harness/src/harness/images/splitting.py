"""Which images are trained on: as their folders say, and by class where no folder does."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.splits import split_positions
from harness.errors import UserError
from harness.images.finding import Labelled

SPLITS = ("train", "val", "test")


def split_rows(
    found: Labelled,
    rows: NDArray[np.int64],
    *,
    val_fraction: float,
    test_fraction: float,
    fold: int | None,
    **settings: Any,
) -> dict[str, NDArray[np.int64]]:
    """Positions of the images of each split.

    What folders split stays so; a split without a folder is drawn from ``train``. A folder that has
    only others, for evaluation, has no ``train``.

    Args:
        found: the images.
        rows: of those that can be read.
        val_fraction: share for validation, where no folder has it.
        test_fraction: share for the test, where no folder has it.
        fold: of k-fold cross-validation.
        **settings: others of ``split_positions``.

    Raises:
        UserError: where the images cannot be split, or a fold clashes with a folder.
    """
    classes, splits = found.classes[rows], found.splits[rows]
    given = {split: rows[splits == split] for split in SPLITS if (splits == split).any()}
    missing = [split for split in SPLITS if split not in given]
    if fold is not None and ("test" in given or (given and "train" in missing)):
        root = found.files.root
        raise UserError(
            f"data.fold={fold} draws the test from one folder of classes, and data.root={root} "
            f"has folders of {', '.join(given)}.\n"
            f"Leave out data.fold, or give one of them, such as data.root={root / 'train'}."
        )
    if given and ("train" in missing or not missing):
        return given
    is_drawn = splits == ("train" if given else "")
    parts = split_positions(
        int(is_drawn.sum()),
        val_fraction=val_fraction,
        test_fraction=test_fraction if "test" in missing else val_fraction,
        classes=classes[is_drawn],
        class_names=found.class_names,
        fold=fold,
        **settings,
    )
    drawn = {split: rows[is_drawn][part] for split, part in parts.items()}
    # What a folder has beside train is not split off a second time.
    stays = [part for split, part in drawn.items() if split == "train" or split in given]
    found_rows = drawn | {s: part for s, part in given.items() if s != "train"}
    return found_rows | {"train": np.sort(np.concatenate(stays))}
