"""Arrays of NumPy's are mapped, split and checked; every bad one is told with its place."""

from pathlib import Path

import numpy as np
import pytest
import torch

from harness import UserError
from harness.tables.arrays import Arrays

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3, 2)).astype("float32")
Y = np.arange(60) % 3


def saved(folder: Path, **arrays: np.ndarray) -> dict[str, str]:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return {name: str(folder / f"{name}.npy") for name in arrays}


def arrays(folder: Path, x: np.ndarray = X, y: np.ndarray = Y, **kwargs) -> Arrays:
    return Arrays(**saved(folder, inputs=x, targets=y), batch_size=8, **kwargs)


def test_whole_numbers_are_classes_in_proportion(tmp_path: Path) -> None:
    data = arrays(tmp_path)
    assert data.facts["num_classes"] == 3
    assert data.facts["in_features"] == 6
    inputs, labels = data.make_dataset("val").__getitems__(list(range(9)))
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    rows = data.split_rows["val"]
    assert torch.equal(inputs, torch.from_numpy(X[rows]))
    assert isinstance(data.make_dataset("train").inputs, np.memmap)


def test_fractions_are_numbers_with_the_scale_of_the_training_rows(tmp_path: Path) -> None:
    y = RNG.standard_normal(60) * 5
    data = arrays(tmp_path, y=y)
    assert "num_classes" not in data.facts
    train = y[data.split_rows["train"]].astype("float32")
    assert data.target_mean == pytest.approx(train.mean(), rel=1e-6)
    assert data.target_std == pytest.approx(train.std(), rel=1e-6)
    _, targets = data.make_dataset("test").__getitems__([0])
    assert targets.dtype == torch.float32


def test_splits_of_their_own_are_taken_whole(tmp_path: Path) -> None:
    own = saved(
        tmp_path, val_inputs=X[:9], val_targets=Y[:9], test_inputs=X[:6], test_targets=Y[:6]
    )
    data = arrays(tmp_path, **own)
    sizes = [len(data.dataset(split)) for split in ("train", "val", "test", "predict")]
    assert sizes == [60, 9, 6, 6]
    with pytest.raises(UserError, match=r"data.val_targets is not set"):
        arrays(tmp_path, val_inputs=own["val_inputs"])
    with pytest.raises(UserError, match=r"data.fold=1 has no use"):
        arrays(tmp_path, fold=1, **own)


def test_new_inputs_need_no_training_arrays(tmp_path: Path) -> None:
    facts = arrays(tmp_path).facts
    for path in tmp_path.glob("*.npy"):
        path.unlink()
    new = saved(tmp_path, predict_inputs=X[:4])
    data = Arrays("gone.npy", "gone.npy", batch_size=8, **new)
    data.facts = facts
    assert data.make_dataset("predict").__getitems__([0, 1]).shape == (2, 3, 2)
    saved(tmp_path, predict_inputs=X[:4, :2])
    with pytest.raises(UserError, match=r"samples of shape \(2, 2\); in training it was \(3, 2\)"):
        data.make_dataset("predict")


def test_bad_arrays_are_told(tmp_path: Path) -> None:
    rows = np.arange(60)
    for changes, message in (
        ({"y": Y[:50]}, r"inputs.npy has 60 samples, and .*targets.npy has 50"),
        ({"x": np.where(rows[:, None, None] == 7, np.nan, X)}, "NaN .* at sample 7"),
        ({"y": np.where(rows == 8, np.inf, 1.5)}, "targets.npy has NaN .* at sample 8"),
        ({"y": Y - 1}, "has the label -1 at sample 0: classes count from 0"),
        ({"y": Y * 1000}, "has the label 2000 among 60: classes count from 0"),
        ({"y": np.stack([Y, Y], 1)}, r"classes of shape \(60, 2\): give each sample one label"),
        ({"x": X[:, 0, 0]}, r"has the shape \(60,\); it must be \(N, ...\)"),
        ({"x": X[:0], "y": Y[:0]}, "inputs.npy has no samples"),
        ({"x": np.array([["a"]] * 60)}, "holds <U1 of shape .*, and no numbers"),
        ({"x": np.array([[None]] * 60)}, "holds Python objects, which could run code"),
        ({"y": np.array([0] * 59 + [1])}, r"Too few samples of class 1 \(1\)"),
    ):
        with pytest.raises(UserError, match=message) as told:
            arrays(tmp_path, **changes).make_dataset("train")
        assert len(str(told.value).splitlines()) <= 3
    good = saved(tmp_path, inputs=X, targets=Y)
    (tmp_path / "cut.npy").write_bytes(Path(good["inputs"]).read_bytes()[:300])
    for wrong, message in {
        "nope.npy": "nope.npy cannot be read: No such file",
        "x.npz": "must be a .npy file: np.save",
        "cut.npy": "is damaged",
    }.items():
        with pytest.raises(UserError, match=message):
            Arrays(str(tmp_path / wrong), good["targets"], batch_size=8).make_dataset("train")
