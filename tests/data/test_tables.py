import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from harness import UserError, predict, train
from harness.command.compose import compose
from project.data.tables import Table

CITIES = ["Rome", "Oslo", "Bonn"]
BRIEF = ("strategy=cpu", "trainer.enable_progress_bar=false", "logger=none", "data.batch_size=9")


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


def houses(file: str, **kwargs: Any) -> Table:
    settings: dict[str, Any] = {"target": "price", "categories": ["zip"], "batch_size": 8}
    return Table(file=file, **settings | kwargs)


def everything(data: Table) -> torch.Tensor:
    parts = [data.make_dataset(split) for split in ("train", "val", "test")]
    return torch.cat([part.__getitems__(list(range(len(part))))[0] for part in parts])


def test_columns_become_numbers_marks_and_codes(tmp_path: Path) -> None:
    data = houses(written(tmp_path))
    assert torch.equal(everything(data), everything(houses(written(tmp_path, suffix=".parquet"))))
    assert (data.facts["in_features"], data.facts["cardinalities"]) == (7, [4, 3])
    inputs, targets = data.make_dataset("train").__getitems__(list(range(42)))
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.float32)
    positions = data.rows["train"]
    assert torch.equal(targets, torch.from_numpy(1000.0 + positions).float())
    # size, rooms, new, built; then the mark of `rooms`; then city and zip.  style: ignore
    size = np.array(rows()["size"])[positions]
    expected = torch.from_numpy((size - size.mean()) / size.std()).float()
    torch.testing.assert_close(inputs[:, 0], expected)
    is_missing = torch.from_numpy(positions % 5 == 0)
    assert torch.equal(inputs[:, 4] == 1, is_missing)
    assert (inputs[is_missing, 1] == 0).all()
    torch.testing.assert_close(inputs[:, 2:4].mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    codes = {None: 0, "Bonn": 1, "Oslo": 2, "Rome": 3}
    assert inputs[:, 5].tolist() == [codes[rows()["city"][int(row)]] for row in positions]
    assert data.facts["target_mean"] == pytest.approx(targets.mean().item())


def test_scales_and_categories_are_those_of_the_training_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = houses(written(tmp_path))
    is_changed = pl.arange(60) == int(first.rows["test"][0])
    table = rows().with_columns(
        size=pl.when(is_changed).then(1e6).otherwise(pl.col("size")),
        city=pl.when(is_changed).then(pl.lit("Paris")).otherwise(pl.col("city")),
    )
    second = houses(written(tmp_path, table))
    assert second.facts == first.facts
    assert second.make_dataset("test").__getitems__([0])[0][0, 5] == 0
    assert "Column city: 1 rows have values that the training rows lack." in capsys.readouterr().out


def test_missing_values_may_have_spaces_and_categories_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f'{i}, {"ab?"[i % 3]}, {["NA", i][i % 2]},"{"xy"[i % 2]}"' for i in range(60)]
    (tmp_path / "a.csv").write_text("id, k, n, y\n" + "\n".join(lines) + "\n")
    data = houses(str(tmp_path / "a.csv"), target="y", classes=True, ignore="id", categories=[])
    assert (data.facts["cardinalities"], data.facts["class_names"]) == ([3], ["x", "y"])
    assert data.facts["in_features"] == 3  # n, its mark, k
    assert "1 columns of numbers; categories k (2); classes x, y" in capsys.readouterr().out


def test_labels_may_be_texts_or_numbers(tmp_path: Path) -> None:
    for labels, names in (
        (["cat", "dog"], ["cat", "dog"]),
        ([10, 9], ["9", "10"]),
        ([True, False], ["false", "true"]),
    ):
        table = rows().with_columns(pl.Series("kind", [labels[i % 3 == 0] for i in range(60)]))
        data = houses(written(tmp_path, table), target="kind", classes=True)
        assert data.facts["class_names"] == names
        train_rows = data.make_dataset("train")
        _, targets = train_rows.__getitems__(list(range(len(train_rows))))
        assert targets.dtype == torch.int64
        assert sorted(targets.bincount().tolist()) == [14, 28]


def test_a_run_predicts_new_rows_without_the_training_file(tmp_path: Path) -> None:
    table = rows().with_columns(kind=rows()["price"] % 3, id=pl.col("price"))
    file = Path(written(tmp_path, table))
    words = (
        "experiment=table_classes",
        f"data.file={file}",
        "data.target=kind",
        "data.ignore=[id]",
    )
    run = train(*words, *BRIEF, "trainer.max_epochs=2", f"output_dir={tmp_path}/out")
    new = tmp_path / "new.csv"
    table.drop("kind").write_csv(new)
    file.unlink()
    output = f"output={tmp_path / 'table.csv'}"
    found = pl.read_csv(predict(run.checkpoint, f"data.predict_file={new}", output))
    assert found["id"].to_list() == [1000 + i for i in range(60)]


def test_a_file_of_its_own_is_tested_on(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    rows(20).with_columns(price=pl.lit(7.0)).write_csv(own)
    data = houses(written(tmp_path), test_file=str(own))
    assert len(data.make_dataset("train")) + len(data.make_dataset("val")) == 60
    assert data.make_dataset("test").__getitems__([3])[1].tolist() == [7.0]


def test_constant_and_empty_columns_are_harmless(tmp_path: Path) -> None:
    table = rows().with_columns(same=pl.lit(0.1), none=pl.lit(None, pl.Float64))
    inputs = everything(houses(written(tmp_path, table)))
    assert inputs.isfinite().all()
    assert (inputs[:, 4:6] == 0).all()


def lines(*values: str) -> str:
    return "a,b,price\n" + "".join(f"{i % 5},{i % 3},{i}\n" for i in range(20)) + "\n".join(values)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("", {}, "cannot be read"),
        (lines(), {"file": "nope.csv"}, "data.file=nope.csv cannot be read: No such file"),
        (lines(), {"file": "http://127.0.0.1:9/a.csv"}, "type data.allow_urls=true"),
        (lines("1,2,"), {}, "has no value in 1 of 21 rows"),
        (",b,price\n1,2,3\n", {}, "column without a name, such as the index that pandas writes"),
        ("a;b;price\n1;2;3\n", {}, "type: 'data.separator=\";\"'"),
        (lines(), {"file": "conf"}, "data.file=conf is a folder. Name a CSV or parquet file"),
        (lines(), {"ignore": ["price"]}, "data.ignore=[price] leaves out data.target=price"),
        (lines(), {"target": "prize"}, "no column prize.\nChoose from its columns: a, b, price"),
        (lines(), {"ignore": ["a", "b"]}, "no columns besides"),
        (lines("1,2,x"), {}, "data.target=price has texts such as 'x'"),
        ("a,price\n" + "1,x\n2,y\n" * 20, {}, "For classes use experiment=table_classes"),
        (lines("1,2,3"), {"classes": True}, "cannot be classes"),
        ("a,price\n" + "1,x\n2,y\n" * 20 + "1,z\n", {"classes": True}, "Class z has 1 samples"),
    ],
)
def test_mistakes_are_told_in_lines(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "t.csv").write_text(text)
    chosen: dict[str, Any] = {"file": str(tmp_path / "t.csv"), "target": "price", "batch_size": 8}
    with pytest.raises(UserError) as told:
        Table(**chosen | settings).make_dataset("train")
    assert message in str(told.value)
    assert len(str(told.value).splitlines()) <= 3


def test_no_file_allows_an_address_and_a_command_does(tmp_path: Path) -> None:
    conf = Path(shutil.copytree("conf", tmp_path / "conf"))
    text = "defaults: [override /data: table]\ndata: {file: 'http://a/b', allow_urls: true}\n"
    (conf / "experiment" / "theirs.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises(UserError, match=r"data\.allow_urls is true in a YAML file"):
        compose("train", ["experiment=theirs"], conf)
    assert compose("train", ["experiment=theirs", "data.allow_urls=true"], conf).data.allow_urls
