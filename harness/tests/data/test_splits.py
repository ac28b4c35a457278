"""Splits and folds have each sample once, and classes in proportion."""

import itertools
from typing import Any

import numpy as np
import pytest

from harness.data.splits import SplitDataModule
from harness.errors import UserError

CLASSES = np.repeat([0, 1, 2], [60, 30, 10])


def split(num_samples: int = 100, classes: Any = None, names: Any = None, **settings: Any) -> Any:
    settings = {"val_fraction": 0.1, "test_fraction": 0.2, "batch_size": 1} | settings
    return SplitDataModule(**settings).split(num_samples, classes, names)


def test_each_sample_is_in_exactly_one_split_and_classes_are_in_proportion() -> None:
    for classes, fold in itertools.product((None, CLASSES), (None, 0, 4)):
        splits = split(classes=classes, fold=fold)
        sizes = {name: len(rows) for name, rows in splits.items()}
        assert sizes == {"train": 70, "val": 10, "test": 20}
        assert sorted(np.concatenate(list(splits.values()))) == list(range(100))
        assert all((np.diff(rows) > 0).all() for rows in splits.values())
    counts = {name: np.bincount(CLASSES[rows]).tolist() for name, rows in splits.items()}
    assert counts == {"train": [42, 21, 7], "val": [6, 3, 1], "test": [12, 6, 2]}


def test_each_sample_is_tested_in_exactly_one_fold() -> None:
    for classes in (None, CLASSES[:97]):
        folds = [split(97, classes, fold=k) for k in range(5)]
        assert sorted(np.concatenate([one["test"] for one in folds])) == list(range(97))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 2}, "2 samples cannot be split by data.val_fraction=0.1"),
        ({"val_fraction": 0.0}, r"data.val_fraction=0.0 must be above 0"),
        ({"test_fraction": 0.9}, "100 samples cannot be split .*test_fraction=0.9"),
        ({"fold": 5}, r"data.fold=5 must be from 0 to 4"),
        (
            {"classes": np.array([0] * 98 + [1] * 2)},
            r"Class 1 has 2 samples, and each class needs 3",
        ),
        (
            {"classes": np.array([0] * 96 + [1] * 4), "fold": 0, "names": ["cat", "dog"]},
            r"Class dog has 4 samples, and each class needs 5",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(**settings)


def test_another_split_or_other_samples_than_in_training_are_told(caplog) -> None:
    data = SplitDataModule(batch_size=1)
    for fact, is_told in (
        (data.drawn_from(7), False),
        ("7", False),  # of a run of an earlier version
        (data.drawn_from(8), True),
        (SplitDataModule(batch_size=1, split_seed=1).drawn_from(7), True),
    ):
        caplog.clear()
        data.facts = {"drawn_from": fact}
        data.warn_if_changed(7)
        assert ("may contain samples of the training" in caplog.text) == is_told


def test_classes_may_be_a_list() -> None:
    found, expected = split(classes=CLASSES.tolist()), split(classes=CLASSES)
    assert all((found[name] == expected[name]).all() for name in expected)
