from pathlib import Path

import pytest
import torch

from harness import UserError, predict, train
from project.data.table import Table, read_csv


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    path = tmp_path / "houses.csv"
    rows = [f"{i},{i % 3},{1000 + i},7" for i in range(40)]
    path.write_text("\n".join(["size,rooms,price,floor", *rows]) + "\n")
    return path


def table(path: Path, **kwargs) -> Table:
    return Table(batch_size=8, path=str(path), target="price", **kwargs)


def test_splits_do_not_mix_and_lose_nothing(houses: Path) -> None:
    data = table(houses)
    prices = [data.make_dataset(split).targets.tolist() for split in ("train", "val", "test")]
    assert [len(part) for part in prices] == [28, 6, 6]
    assert sorted(price for part in prices for price in part) == [1000 + i for i in range(40)]


def test_splits_do_not_depend_on_the_seed_of_the_run(houses: Path) -> None:
    first, second = table(houses, seed=1), table(houses, seed=2)
    assert torch.equal(first.make_dataset("test").inputs, second.make_dataset("test").inputs)
    other = table(houses, split_seed=1)
    assert not torch.equal(first.make_dataset("test").inputs, other.make_dataset("test").inputs)


def test_scales_are_those_of_the_training_rows_alone(houses: Path) -> None:
    data = table(houses)
    train, test = data.make_dataset("train"), data.make_dataset("test")
    torch.testing.assert_close(train.inputs[:, :2].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.inputs[:, :2].std(0, correction=0), torch.ones(2))
    assert test.inputs[:, 0].mean().abs() > 1e-3
    assert (train.inputs[:, 2] == 0).all()  # a column that never changes
    assert data.target_mean == pytest.approx(train.targets.double().mean().item())


def test_features_can_be_chosen(houses: Path) -> None:
    assert table(houses, features=["rooms"]).make_dataset("val").inputs.shape == (6, 1)


def test_without_a_path_it_is_the_diabetes_data() -> None:
    data = Table(batch_size=8)
    inputs, targets = data.make_dataset("train").__getitems__([3, 1])
    assert inputs.shape == (2, 10)
    assert 25 <= targets.min() <= targets.max() <= 346


def test_new_rows_need_no_targets_and_are_scaled_alike(houses: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("floor,size,rooms\n7,0,0\n")  # in another order
    data = table(houses, predict_file=str(new))
    (row,) = data.make_dataset("predict").__getitems__([0])
    rows = torch.cat([data.make_dataset(split).inputs for split in ("train", "val", "test")])
    assert (rows == row).all(dim=1).any()  # the first house


@pytest.mark.parametrize(
    ("text", "names", "message"),
    [
        ("a,b\n1,2\n", ["a", "c"], "t.csv has no column c.\nIt has a, b."),
        ("a,b\n1,2\n3,x\n", None, "t.csv, line 3: could not convert string to float: 'x'."),
        ("a,b\n1,2\n3\n", None, "line 3: "),
        ("a,b\n1,nan\n", None, "line 2: a number that is not finite"),
        ("a,b\n", None, "has no rows"),
        ("", None, "has no rows"),
    ],
)
def test_bad_tables_are_refused(text: str, names, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_csv("data.path", str(path), names)
    assert message in str(error.value)


def test_missing_file_and_target_are_named(houses: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path=.*nope\.csv cannot be read: No such file"):
        table(tmp_path / "nope.csv").make_dataset("train")
    with pytest.raises(UserError, match=r"data\.target=cost is not in .*: size, rooms, price"):
        Table(batch_size=8, path=str(houses), target="cost").make_dataset("train")


def test_other_columns_may_hold_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeffname,a,price\nBob,1,2\n\nEve,2,3\n", encoding="utf-8")
    assert read_csv("data.path", str(path), ["a", "price"])[1].tolist() == [[1, 2], [2, 3]]


def test_new_rows_are_predicted(houses: Path, tmp_path: Path) -> None:
    """A CSV without targets goes in, a row per sample comes out."""
    new, output = tmp_path / "new.csv", tmp_path / "predictions.csv"
    new.write_text("size,rooms,floor\n3,0,7\n4,1,7\n")
    words = ("data=table", f"data.path={houses}", "data.target=price", "model=regressor")
    short = ("model.net.in_features=3", "trainer.max_epochs=1", "trainer.log_every_n_steps=1")
    quiet = ("strategy=cpu", "callbacks.progress_bar=null")
    run = train(*words, *short, *quiet, f"output_dir={tmp_path / 'out'}")
    predict(run.checkpoint, f"data.predict_file={new}", f"output={output}")
    rows = output.read_text().splitlines()
    assert rows[0] == "sample,prediction"
    assert len(rows) == 3
