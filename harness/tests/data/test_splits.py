import itertools

import numpy as np
import pytest

from harness.data.splits import split_positions
from harness.errors import UserError

FRACTIONS = {"val_fraction": 0.1, "test_fraction": 0.2, "seed": 0}
CLASSES = np.repeat([0, 1, 2], [60, 30, 10])


def test_each_sample_is_in_exactly_one_split():
    for classes, fold in itertools.product((None, CLASSES), (None, 0, 4)):
        splits = split_positions(100, classes=classes, fold=fold, **FRACTIONS)
        sizes = {name: len(rows) for name, rows in splits.items()}
        assert sizes == {"train": 70, "val": 10, "test": 20}
        assert sorted(np.concatenate(list(splits.values()))) == list(range(100))
        assert all((np.diff(rows) > 0).all() for rows in splits.values())


def test_classes_are_in_proportion_in_every_split():
    splits = split_positions(100, classes=CLASSES, **FRACTIONS)
    counts = {name: np.bincount(CLASSES[rows]).tolist() for name, rows in splits.items()}
    assert counts == {"train": [42, 21, 7], "val": [6, 3, 1], "test": [12, 6, 2]}


def test_each_sample_is_tested_in_exactly_one_fold():
    for classes in (None, CLASSES[:97]):
        folds = [split_positions(97, classes=classes, fold=k, **FRACTIONS) for k in range(5)]
        assert sorted(np.concatenate([one["test"] for one in folds])) == list(range(97))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 2}, "2 samples cannot be split"),
        ({"val_fraction": 0.0}, r"data.val_fraction=0.0 must be a share"),
        ({"test_fraction": 0.9}, "cannot be split into 10 to validate, 90"),
        ({"fold": 5}, r"data.fold=5 must be from 0 to 4"),
        ({"classes": np.array([0] * 98 + [1] * 2)}, r"class 1 \(2\): each class needs 3"),
        (
            {"classes": np.array([0] * 96 + [1] * 4), "fold": 0, "class_names": ["cat", "dog"]},
            r"class dog \(4\): each class needs 5",
        ),
    ],
)
def test_what_cannot_be_split_is_told(changes, message):
    arguments = {"num_samples": 100, **FRACTIONS, **changes}
    with pytest.raises(UserError, match=message):
        split_positions(**arguments)
