"""Data modules whose train, validation and test samples are drawn from one set of samples.

In: the number of samples, and their classes. Out: seeded positions of each split, by class, or in k
folds. Next: a subclass makes its data sets of them.
"""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.datamodule import DataModule
from harness.errors import UserError
from harness.processes.launcher import global_rank

log = logging.getLogger(__name__)


class SplitDataModule(DataModule):
    """Draw the splits of a data module; subclasses call ``split`` and ``warn_if_changed``.

    Args:
        val_fraction: share of all samples kept for validation.
        test_fraction: share kept for the test; a fold has its own, ``1 / num_folds``.
        split_seed: decides which samples; independent of the run's seed, so that runs compare.
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

    def split(
        self,
        num_samples: int,
        classes: NDArray[Any] | None = None,
        class_names: list[str] | None = None,
    ) -> dict[str, NDArray[np.int64]]:
        """Draw sorted positions of ``"train"``, ``"val"`` and ``"test"``.

        They depend on the settings alone. Each sample is in the test split of exactly one fold.

        Every split has the ``classes`` in proportion, shape (N,), which messages call by
        ``class_names``.

        Raises:
            UserError: if a number is out of its range, a split would be empty, or a class has too
                few samples to be in all of them.
        """
        num_val, num_test = self._sizes(num_samples)
        if classes is not None:
            values, counts = np.unique(classes, return_counts=True)
            num_needed, rarest = 3 if self.fold is None else self.num_folds, int(counts.argmin())
            if counts[rarest] < num_needed:
                name = class_names[values[rarest]] if class_names else values[rarest]
                raise UserError(
                    f"Too few samples of class {name} ({counts[rarest]}): each class needs "
                    f"{num_needed} to be split.\nAdd samples, or leave this class out."
                )
        # It takes a second to import, and only what splits needs it.
        from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

        rest, seed = np.arange(num_samples), self.split_seed

        def part_of(rows: NDArray[Any], size: int) -> Any:
            stratify = None if classes is None else classes[rows]
            return train_test_split(rows, test_size=size, stratify=stratify, random_state=seed)

        try:
            if self.fold is None:
                rest, test = part_of(rest, num_test)
            else:
                kind = KFold if classes is None else StratifiedKFold
                folds = kind(self.num_folds, shuffle=True, random_state=seed)
                rest, test = list(folds.split(rest, classes))[self.fold]
            train, val = part_of(rest, num_val)
        except ValueError as error:  # scikit-learn says which number is too large
            raise UserError(
                f"{num_samples} samples cannot be split by data.val_fraction={self.val_fraction} "
                f"and data.test_fraction={self.test_fraction}: {error}"
            ) from error
        return {"train": np.sort(train), "val": np.sort(val), "test": np.sort(test)}

    def _sizes(self, num_samples: int) -> tuple[int, int]:
        """Return the samples to validate and to test."""
        fold, num_folds, test_fraction = self.fold, self.num_folds, self.test_fraction
        if fold is not None:
            if not 2 <= num_folds <= num_samples or not 0 <= fold < num_folds:
                raise UserError(
                    f"data.fold={fold} must be from 0 to {num_folds - 1}, and data.num_folds="
                    f"{num_folds} from 2 to {num_samples}, the number of samples.\n"
                    "Use data.fold=null to draw one test split instead."
                )
            test_fraction = 1 / num_folds
        for name, value in (("val", self.val_fraction), ("test", test_fraction)):
            if not isinstance(value, (int, float)) or not 0 < value < 1:
                raise UserError(f"data.{name}_fraction={value} must be above 0 and below 1.")
        num_val = max(1, round(self.val_fraction * num_samples))
        return num_val, max(1, round(test_fraction * num_samples))

    def drawn_from(self, checksum: int | str) -> str:
        """Describe what splits are drawn from: samples, by their checksum, and settings.

        ``learn`` returns it as the fact of that name.
        """
        names = ("split_seed", "val_fraction", "test_fraction", "fold", "num_folds")
        return ", ".join([str(checksum), *(f"data.{name}={getattr(self, name)}" for name in names)])

    def warn_if_changed(self, checksum: int | str) -> None:
        """Warn where samples, or how they are split, differ from those of the training."""
        before, now = str(self.facts.get("drawn_from", "")), self.drawn_from(checksum)
        if before not in ("", str(checksum), now):  # earlier versions have the checksum alone
            log.warning(
                "The test may have samples that were trained on: the data or its split (%s) is "
                "another one than in the training (%s).",
                now,
                before,
            )

    @staticmethod
    def say(line: str) -> None:
        """Log a line about the data, and print it in the first process."""
        log.info("%s", line)
        if global_rank() == 0:
            print(line, flush=True)
