"""Data modules that draw their train, validation and test splits from one set of samples.

In: the number of samples, and their classes. Out: the seeded positions of each split, stratified by
class or in k folds. Next: a subclass builds its data sets from them.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.datamodule import DataModule
from harness.distributed.launcher import global_rank
from harness.errors import UserError

log = logging.getLogger(__name__)


class SplitDataModule(DataModule):
    """A data module with seeded splits; subclasses call ``split`` and ``warn_if_changed``.

    Args:
        val_fraction: fraction of all samples in the validation split.
        test_fraction: fraction of all samples in the test split; a fold has ``1 / num_folds``.
        split_seed: seeds the splits; independent of the run's seed, so that runs are comparable.
        fold: which of the ``num_folds`` folds is the test split, from 0; ``None`` draws a test
            split of ``test_fraction`` instead.
        num_folds: number of folds, of equal size.
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
        classes: Sequence[Any] | NDArray[Any] | None = None,
        class_names: list[str] | None = None,
    ) -> dict[str, NDArray[np.int64]]:
        """Return the sorted positions of ``"train"``, ``"val"`` and ``"test"``.

        The positions depend only on the arguments and the settings. Each sample is in the test
        split of exactly one fold.

        Args:
            num_samples: the number of samples, N.
            classes: the class of each sample, shape (N,). Each split then has all classes in the
                same proportions.
            class_names: the names of the classes in messages.

        Raises:
            UserError: if a number is out of its range, a split would be empty, or a class has too
                few samples to be in every split.
        """
        num_val, num_test = self._sizes(num_samples)
        if classes is not None:
            values, counts = np.unique(classes, return_counts=True)
            num_needed, rarest = 3 if self.fold is None else self.num_folds, int(counts.argmin())
            if counts[rarest] < num_needed:
                name = class_names[values[rarest]] if class_names else values[rarest]
                raise UserError(
                    f"Class {name} has {counts[rarest]} samples, and each class needs {num_needed} "
                    "to be in every split.\nAdd samples, or leave this class out."
                )
        # The import takes a second, and only this method needs it.
        from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

        rest, seed = np.arange(num_samples), self.split_seed

        def split_off(rows: NDArray[Any], size: int) -> Any:
            stratify = None if classes is None else np.asarray(classes)[rows]
            return train_test_split(rows, test_size=size, stratify=stratify, random_state=seed)

        try:
            if self.fold is None:
                rest, test = split_off(rest, num_test)
            else:
                kind = KFold if classes is None else StratifiedKFold
                folds = kind(self.num_folds, shuffle=True, random_state=seed)
                rest, test = list(folds.split(rest, classes))[self.fold]
            train, val = split_off(rest, num_val)
        except ValueError as error:  # scikit-learn's error has the number that is too large
            raise UserError(
                f"{num_samples} samples cannot be split by data.val_fraction={self.val_fraction} "
                f"and data.test_fraction={self.test_fraction}: {error}\n"
                "Use other fractions, or more samples."
            ) from error
        return {"train": np.sort(train), "val": np.sort(val), "test": np.sort(test)}

    def _sizes(self, num_samples: int) -> tuple[int, int]:
        """Return the number of validation and of test samples."""
        fold, num_folds, test_fraction = self.fold, self.num_folds, self.test_fraction
        if fold is not None:
            problem = f"data.fold={fold} must be from 0 to {num_folds - 1}"
            if has_wrong_number := not 2 <= num_folds <= num_samples:
                problem = f"data.num_folds={num_folds} must be from 2 to {num_samples} samples"
            if has_wrong_number or not 0 <= fold < num_folds:
                raise UserError(f"{problem}.\nUse data.fold=null to draw one test split instead.")
            test_fraction = 1 / num_folds
        for name, value in (("val", self.val_fraction), ("test", test_fraction)):
            if not isinstance(value, (int, float)) or not 0 < value < 1:
                raise UserError(f"data.{name}_fraction={value} must be above 0 and below 1.")
        num_val = max(1, round(self.val_fraction * num_samples))
        return num_val, max(1, round(test_fraction * num_samples))

    def drawn_from(self, checksum: int | str) -> str:
        """Return a text of the samples' checksum and all settings that the splits depend on.

        ``infer_facts`` returns this text as the fact ``drawn_from``.
        """
        names = ("split_seed", "val_fraction", "test_fraction", "fold", "num_folds")
        return ", ".join([str(checksum), *(f"data.{name}={getattr(self, name)}" for name in names)])

    def warn_if_changed(self, checksum: int | str) -> None:
        """Log a warning if the samples or their splits differ from the training's."""
        before, now = str(self.facts.get("drawn_from", "")), self.drawn_from(checksum)
        if before not in ("", str(checksum), now):  # earlier versions stored only the checksum
            log.warning(
                "The test split may contain samples of the training: the data or its split (%s) "
                "differs from that of the training (%s).\nUse the training's data and settings.",
                now,
                before,
            )

    @staticmethod
    def say(line: str) -> None:
        """Log a line about the data on every rank, and print it on rank 0."""
        log.info("%s", line)
        if global_rank() == 0:
            print(line, flush=True)
