"""Which samples are trained on, validated on and tested on: seeded, by class, or in k folds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import UserError


def split_positions(
    num_samples: int,
    *,
    val_fraction: float,
    test_fraction: float,
    seed: int,
    classes: NDArray[Any] | None = None,
    class_names: Sequence[str] | None = None,
    fold: int | None = None,
    num_folds: int = 5,
) -> dict[str, NDArray[np.int64]]:
    """Split samples into ``"train"``, ``"val"`` and ``"test"``: sorted positions of each.

    They depend on the arguments alone. Each sample is in the test split of exactly one fold.

    Args:
        num_samples: samples to split.
        val_fraction: share of all samples kept for validation.
        test_fraction: share kept for the test; a fold has its own, ``1 / num_folds``.
        seed: decides which samples; independent of the run's seed, so that runs compare.
        classes: each sample's class, shape (N,); every split has them in proportion.
        class_names: what messages call class 0, 1, ...
        fold: the part that is the test split, from 0; ``None`` draws ``test_fraction``.
        num_folds: parts of equal size.

    Raises:
        UserError: if a number is out of its range, a split would be empty, or a class has too few
            samples to be in all of them.
    """
    if fold is not None:
        if not 2 <= num_folds <= num_samples or not 0 <= fold < num_folds:
            raise UserError(
                f"data.fold={fold} must be from 0 to {num_folds - 1}, and data.num_folds="
                f"{num_folds} from 2 to {num_samples}, the number of samples.\n"
                "Use data.fold=null to draw one test split instead."
            )
        test_fraction = 1 / num_folds
    for name, value in (("val", val_fraction), ("test", test_fraction)):
        if not isinstance(value, (int, float)) or not 0 < value < 1:
            raise UserError(f"data.{name}_fraction={value} must be a share above 0 and below 1.")
    num_val = max(1, round(val_fraction * num_samples))
    num_test = max(1, round(test_fraction * num_samples))
    if num_val + num_test >= num_samples:
        raise UserError(
            f"{num_samples} samples cannot be split into {num_val} to validate, {num_test} to "
            "test, and some to train on.\nGive more samples, or smaller data.val_fraction and "
            "data.test_fraction."
        )
    if classes is not None:
        values, counts = np.unique(classes, return_counts=True)
        num_needed, rarest = 3 if fold is None else num_folds, int(counts.argmin())
        if counts[rarest] < num_needed:
            name = class_names[values[rarest]] if class_names else values[rarest]
            raise UserError(
                f"Too few samples of class {name} ({counts[rarest]}): each class needs "
                f"{num_needed} to be split.\nAdd samples, or leave this class out."
            )
        if min(num_val, num_test) < len(values):
            raise UserError(
                f"{len(values)} classes cannot all be in {num_val} samples to validate and "
                f"{num_test} to test.\nUse larger data.val_fraction and data.test_fraction."
            )

    # It takes a second to import, and only what splits needs it.
    from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

    everything = np.arange(num_samples)
    if fold is None:
        rest, test = train_test_split(
            everything, test_size=num_test, stratify=classes, random_state=seed
        )
    else:
        kind = KFold if classes is None else StratifiedKFold
        folds = kind(num_folds, shuffle=True, random_state=seed)
        rest, test = list(folds.split(everything, classes))[fold]
    stratify = None if classes is None else classes[rest]
    train, val = train_test_split(rest, test_size=num_val, stratify=stratify, random_state=seed)
    return {"train": np.sort(train), "val": np.sort(val), "test": np.sort(test)}
