"""A table's columns as one matrix, learnt from the training rows alone; every mistake is told."""

import logging
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from harness import UserError
from harness.tables.table import Table

CITIES = ["Rome", "Oslo", "Bonn"]


def rows(num_rows: int = 60) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "size": [i % 17 + 0.5 for i in range(num_rows)],
            "rooms": [None if i % 5 == 0 else i % 3 for i in range(num_rows)],
            "city": [None if i % 7 == 0 else CITIES[i % 3] for i in range(num_rows)],
            "zip": [["01234", "99"][i % 2] for i in range(num_rows)],
            "new": [i % 2 == 0 for i in range(num_rows)],
            "built": [f"20{i % 20:02}-03-01" for i in range(num_rows)],
            "price": [1000 + i for i in range(num_rows)],
        }
    )


def written(folder: Path, table: pl.DataFrame | None = None, suffix: str = ".csv") -> str:
    path = folder / f"houses{suffix}"
    table = rows() if table is None else table
    table.write_csv(path) if suffix == ".csv" else table.write_parquet(path)
    return str(path)


def houses(file: str, **kwargs) -> Table:
    settings = {"target": "price", "categories": ["zip"], "batch_size": 8}
    return Table(file=file, **settings | kwargs)


def test_missing_values_may_have_spaces_or_quotes_around_them(tmp_path: Path) -> None:
    lines = [f'{i}, {"ab?"[i % 3]}, {["NA", i][i % 2]},"{"xy"[i % 2]}"' for i in range(60)]
    (tmp_path / "a.csv").write_text("id, k, n, y\n" + "\n".join(lines) + "\n")
    settings = {"target": "y", "classes": True, "ignore": ["id"], "categories": []}
    facts = houses(str(tmp_path / "a.csv"), **settings).facts
    assert (facts["cardinalities"], facts["class_names"]) == ([3], ["x", "y"])
    assert facts["in_features"] == 3  # n, its mark, k
    text = (tmp_path / "a.csv").read_text()
    for empty in ('""', " ", '" "', " ?"):
        (tmp_path / "a.csv").write_text(text.replace('"x"', empty, 5))
        with pytest.raises(UserError, match="y has no value in 5 of 60 rows"):
            _ = houses(str(tmp_path / "a.csv"), **settings).facts


def test_a_file_of_its_own_is_tested_on(tmp_path: Path) -> None:
    file, own = written(tmp_path), tmp_path / "own.csv"
    rows(20).with_columns(pl.lit(7.0).alias("price"), id=pl.col("price")).write_csv(own)
    data = houses(file, test_file=str(own))
    assert len(data.make_dataset("train")) + len(data.make_dataset("val")) == 60
    tested = data.make_dataset("test")
    assert (len(tested), tested.__getitems__([3])[1].tolist()) == (20, [7.0])
    alone = houses(file, test_file=str(own), ignore=["id"])
    alone.facts = data.facts
    Path(file).unlink()  # what was learnt suffices
    about = alone.make_dataset("predict").sample_columns
    assert about == {"row": list(range(20)), "id": [str(1000 + i) for i in range(20)]}


def everything(data: Table) -> torch.Tensor:
    parts = [data.make_dataset(split) for split in ("train", "val", "test")]
    return torch.cat([part.__getitems__(list(range(len(part))))[0] for part in parts])


def test_columns_become_numbers_marks_and_codes(tmp_path: Path) -> None:
    data = houses(written(tmp_path))
    assert torch.equal(everything(data), everything(houses(written(tmp_path, suffix=".parquet"))))
    facts = data.facts
    assert (facts["in_features"], facts["num_numbers"], facts["cardinalities"]) == (7, 5, [4, 3])
    inputs, targets = data.make_dataset("train").__getitems__(list(range(42)))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((42, 7), torch.float32, torch.float32)
    positions = data.split_rows["train"]
    assert torch.equal(targets, torch.from_numpy(1000.0 + positions).float())
    # size, rooms, new, built; then the mark of rooms; then city and zip.
    size = np.array(rows()["size"])[positions]
    expected = torch.from_numpy((size - size.mean()) / size.std()).float()
    torch.testing.assert_close(inputs[:, 0], expected)
    is_missing = torch.from_numpy(positions % 5 == 0)
    assert torch.equal(inputs[:, 4] == 1, is_missing)
    assert (inputs[is_missing, 1] == 0).all()
    torch.testing.assert_close(inputs[:, 2:4].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    code_of = {None: 0, "Bonn": 1, "Oslo": 2, "Rome": 3}
    codes = [code_of[rows()["city"][int(row)]] for row in positions]
    assert inputs[:, 5].tolist() == codes
    assert inputs[:, 6].tolist() == [1 + row % 2 for row in positions]
    assert data.target_mean == pytest.approx(targets.mean().item())


def test_scales_and_categories_are_those_of_the_training_rows(tmp_path: Path) -> None:
    """What only other rows have changes nothing, and is told."""
    first = houses(written(tmp_path))
    test_row = int(first.split_rows["test"][0])
    table = rows().with_row_index("row")
    is_changed = pl.col("row") == test_row
    table = table.with_columns(
        size=pl.when(is_changed).then(1e6).otherwise(pl.col("size")),
        city=pl.when(is_changed).then(pl.lit("Paris")).otherwise(pl.col("city")),
    ).drop("row")
    second = houses(written(tmp_path, table))
    assert second.facts == first.facts
    assert second.make_dataset("test").__getitems__([0])[0][0, 5] == 0


def test_unknown_categories_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    new = tmp_path / "new.csv"
    new.write_text("zip,city,built,new,rooms,size\n" + "99,Paris,2001-01-01,true,1,2\n" * 3)
    data = houses(written(tmp_path), predict_file=str(new))
    with caplog.at_level(logging.WARNING):
        inputs = data.make_dataset("predict").__getitems__([0, 1, 2])
    assert inputs[:, 5].tolist() == [0, 0, 0]
    assert "column city has values that the training rows do not have: 'Paris' (3)" in caplog.text


def test_new_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    names = "size,rooms,city,zip,new,built\n"
    data = houses(written(tmp_path), predict_file=str(tmp_path / "new.csv"))
    for text, message in (
        ("size,rooms,city\n1,2,Rome\n", "new.csv has no column zip, new, built.\nIt has size"),
        (names + "big,2,Rome,99,true,2001-01-01\n",
         "column size holds texts, such as 'big'; in training it held numbers"),
        (names + "1,2,Rome,99,true,7\n", "column built holds numbers; in training it held dates"),
    ):  # fmt: skip
        (tmp_path / "new.csv").write_text(text)
        with pytest.raises(UserError) as told:
            data.make_dataset("predict")
        assert message in str(told.value)


def test_labels_may_be_texts_or_numbers(tmp_path: Path) -> None:
    for labels, names in (
        (["cat", "dog"], ["cat", "dog"]),
        ([10, 9], ["9", "10"]),
        ([True, False], ["false", "true"]),
    ):
        table = rows().with_columns(pl.Series("kind", [labels[i % 3 == 0] for i in range(60)]))
        data = houses(written(tmp_path, table), target="kind", classes=True)
        assert data.facts["class_names"] == names
        assert sorted(data.facts["class_counts"]) == [20, 40]
        train = data.make_dataset("train")
        _, targets = train.__getitems__(list(range(len(train))))
        assert targets.dtype == torch.int64
        assert sorted(targets.bincount().tolist()) == [14, 28]


def test_rows_without_a_target_are_refused_or_left_out(tmp_path: Path) -> None:
    table = rows().with_columns(
        price=pl.when(pl.col("price") == 1003).then(None).otherwise(pl.col("price"))
    )
    file = written(tmp_path, table)
    with pytest.raises(UserError, match=r"has no value in 1 of 60 rows, the first of them row 4"):
        _ = houses(file).facts
    data = houses(file, missing_targets="drop")
    positions = np.concatenate(list(data.split_rows.values()))
    assert sorted(positions) == [i for i in range(60) if i != 3]


def test_each_row_is_tested_in_one_fold(tmp_path: Path) -> None:
    file = written(tmp_path)
    tests = [houses(file, fold=fold).split_rows["test"] for fold in range(5)]
    assert sorted(np.concatenate(tests)) == list(range(60))


def lines(*values: str) -> str:
    return "a,b,price\n" + "".join(f"{i % 5},{i % 3},{i}\n" for i in range(20)) + "\n".join(values)


def test_bad_tables_are_told_in_three_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for text, settings, message in (
        (lines(), {"separator": "::"}, "data.separator=:: must be one character"),
        (lines(), {"missing_targets": "skip"}, "use refuse or drop"),
        (lines("1,2"), {}, "t.csv, line 22: 2 values for 3 columns (1 such line)"),
        (lines('1,2,"3'), {}, "cannot be read: could not parse"),
        ("", {}, "t.csv is empty: its first line must name the columns"),
        ("a,b,price\n", {}, "t.csv has no rows below the names"),
        ("a,a,price\n1,2,3\n", {}, "several columns of the name a"),
        (",b,price\n1,2,3\n", {}, "column 1 has no name, as an index that pandas writes"),
        ("a;b;price\n1;2;3\n", {}, "its separator is another.\nAdd 'data.separator=\";\"'"),
        (lines(), {"target": "prize"}, "has no column prize. Did you mean price?\nIt has a, b, pr"),
        (lines(), {"ignore": ["a", "b"]}, "no column left to predict price from"),
        (lines("1,2,x"), {}, "data.target=price holds no numbers"),
        (lines("1,2,3.5"), {"classes": True}, "has numbers such as 3.5, which name no classes"),
        ("a,price\n" + "1,z\n" * 20, {"classes": True}, "one class alone, 'z': two classes"),
        (
            "a,price\n" + "1,x\n2,y\n" * 20 + "1,z\n",
            {"classes": True},
            "Too few samples of class z (1): each class needs 3",
        ),
        (
            lines("x1,2,3"),
            {},
            "a holds numbers, and 1 others, the first of them 'x1' in row 21",
        ),
        (
            "a;price\n" + "1,5;2\n" * 20,
            {"separator": ";"},
            "column a holds numbers with a decimal comma, such as '1,5'",
        ),
        (
            "id,price\n" + "".join(f"n{i},{i}\n" for i in range(20)),
            {},
            "column id has another text in each of its 20 rows, such as 'n0': an id?\n"
            "Leave it out with data.ignore=[id]",
        ),
        (lines(), {"fold": 5}, "data.fold=5 must be from 0 to 4"),
    ):
        path.write_text(text)
        chosen = {"file": str(path), "target": "price", "batch_size": 8} | settings
        with pytest.raises(UserError) as told:
            Table(**chosen).make_dataset("train")
        assert message in str(told.value)
        assert len(str(told.value).splitlines()) <= 3
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "latin.csv").write_bytes("a,price\n\xe9,1\n".encode("latin1"))
    for name, message in {
        "nope.csv": "nope.csv cannot be read: No such file",
        "t.xlsx": "is no table that can be read.\nUse a .csv, a .tsv or a .parquet file",
        "t.parquet": "is no parquet file, or is damaged",
        "latin.csv": "is no text in UTF-8",
    }.items():
        with pytest.raises(UserError, match=message):
            Table(file=str(tmp_path / name), target="price", batch_size=8).make_dataset("train")


def test_constant_and_empty_columns_are_harmless(tmp_path: Path) -> None:
    table = rows().with_columns(same=pl.lit(0.1), none=pl.lit(None, pl.Float64))
    inputs = everything(houses(written(tmp_path, table)))
    assert inputs.isfinite().all()
    assert (inputs[:, 4:6] == 0).all()  # behind size, rooms, new and built
