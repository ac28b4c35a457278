"""A data module whose train, validation and test samples are drawn from one set of samples."""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.datamodule import DataModule, tell
from harness.data.splits import split_positions

log = logging.getLogger(__name__)


class SplitDataModule(DataModule):
    """Draw the splits of a data module; subclasses call ``split`` and ``warn_if_changed``.

    Args:
        val_fraction: share of the samples kept for validation.
        test_fraction: share kept for the test.
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
        """Draw positions of ``"train"``, ``"val"`` and ``"test"``; see ``split_positions``."""
        return split_positions(
            num_samples,
            val_fraction=self.val_fraction,
            test_fraction=self.test_fraction,
            seed=self.split_seed,
            classes=classes,
            class_names=class_names,
            fold=self.fold,
            num_folds=self.num_folds,
        )

    def warn_if_changed(self, checksum: int | str) -> None:
        """Warn where samples differ from those of the training, which stay in the facts.

        Args:
            checksum: of the samples that splits are drawn from; ``learn`` returns it as the fact
                ``drawn_from``.
        """
        if self.facts.get("drawn_from", checksum) != checksum:
            log.warning(
                "The data differs from that of the training, and so may the split: the test may "
                "have samples that were trained on."
            )

    @staticmethod
    def say(line: str) -> None:
        """Print a line about the data once, in the first process, and log it."""
        tell(line)
