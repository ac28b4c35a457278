"""A table trains alike everywhere, goes on by bit, and is predicted without its training file."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import UserError, evaluate, load_run, predict, train
from tests.conftest import ROOT
from tests.tables.test_table import rows, written

CONF = ROOT / "conf"
EXPERIMENT = ("data.target=kind", "data.categories=[zip]", "data.batch_size=9", "name=houses")


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words for a table with missing numbers and two columns of categories."""
    file = written(tmp_path_factory.mktemp("data"), rows().with_columns(kind=rows()["price"] % 3))
    return ["experiment=table_classes", f"data.file={file}", *EXPERIMENT]


def brief(folder: Path) -> tuple[str, ...]:
    quiet = ("strategy=cpu", "trainer.enable_progress_bar=false", "logger=none")
    return (*quiet, "trainer.max_epochs=2", "checkpoint.every_n_steps=3", f"output_dir={folder}")


def test_a_run_goes_on_by_bit(houses: list[str], tmp_path: Path) -> None:
    run = train(*houses, *brief(tmp_path), "model.net.dropout=0.2", conf=CONF)
    last = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    newest = max(run.folder.glob("checkpoints/step_*.ckpt"), key=lambda path: int(path.stem[5:]))
    newest.unlink()
    (run.folder / "results.json").unlink()
    train(f"resume={run.folder}", conf=CONF)
    again = torch.load(run.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(again[name], value) for name, value in last.items())


def test_new_rows_need_no_training_file(houses: list[str], tmp_path: Path) -> None:
    file = Path(written(tmp_path, rows().with_columns(kind=rows()["price"] % 3)))
    words = [*houses, f"data.file={file}", *brief(tmp_path / "out")]
    run = train(*words, conf=CONF)
    before = evaluate(run.checkpoint, conf=CONF).results["test/loss"]
    assert before == pytest.approx(run.results["test/loss"], abs=1e-6)
    known = table(predict(run.checkpoint, f"output={tmp_path / 'known.csv'}", conf=CONF))
    new = tmp_path / "new.csv"
    rows().write_csv(new)
    file.unlink()
    given = (f"data.predict_file={new}", f"output={tmp_path / 'new_rows.csv'}")
    found = table(predict(run.checkpoint, *given, conf=CONF))
    assert len(found) == 60
    first = next(name for name in found[0] if name.startswith("p_"))
    same = [row for row in found if any(row[first] == other[first] for other in known)]
    assert len(same) >= len(known)  # the test rows are among them
    assert load_run(run.folder).model.net.num_numbers == 6
    with pytest.raises(UserError, match=r"data.file=.*houses.csv cannot be read: No such file"):
        evaluate(run.checkpoint, conf=CONF)


def test_an_evaluation_on_other_rows_or_another_split_is_told(
    houses: list[str], tmp_path: Path
) -> None:
    file = Path(written(tmp_path, rows().with_columns(kind=rows()["price"] % 3)))
    run = train(*houses, f"data.file={file}", *brief(tmp_path / "out"), conf=CONF)

    def told(*words: str) -> str:
        return (evaluate(run.checkpoint, *words, conf=CONF).folder / "run.log").read_text()

    other_split, other_rows = "another split than", "the test may be on rows that were trained on"
    same = told()
    assert other_split not in same
    assert other_rows not in same
    assert other_split in told("data.split_seed=5")
    assert other_split in told("data.fold=1")
    file.write_text(file.read_text() + file.read_text().splitlines()[1] + "\n")
    assert other_rows in told()


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_arrays_of_classes_and_of_numbers_train(tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).standard_normal((60, 3, 2)).astype("float32")
    for name, array in (
        ("x", inputs),
        ("labels", np.arange(60) % 3),
        ("sizes", inputs.sum((1, 2))),
    ):
        np.save(tmp_path / f"{name}.npy", array)
    words = ["data=arrays", f"data.inputs={tmp_path / 'x.npy'}"]
    for model, targets, result in (
        ("table_mlp", "labels", "test/accuracy"),
        ("regressor", "sizes", "test/mae"),
    ):
        chosen = (
            f"model={model}",
            f"data.targets={tmp_path / targets}.npy",
            "trainer.log_every_n_steps=1",
        )
        run = train(*words, *chosen, *brief(tmp_path / model), conf=CONF)
        assert result in run.results


def test_another_table_of_the_same_size_is_told(tmp_path: Path) -> None:
    path, rows = tmp_path / "table.csv", np.random.default_rng(0).random((60, 11))

    def write() -> None:
        text = "\n".join(",".join(f"{x:.6f}" for x in row) for row in rows)
        path.write_text(f"a,b,c,d,e,f,g,h,i,j,target\n{text}\n")

    write()
    words = (
        "experiment=table", f"data.file={path}", "data.batch_size=16", "trainer.max_epochs=2",
        "checkpoint.every_n_steps=1", "callbacks.progress_bar=null", "logger=none", "test=false",
        f"output_dir={tmp_path}",
    )  # fmt: skip
    run = train(*words)

    def go_on() -> str:
        for file in ("results.json", "run.log"):
            (run.folder / file).unlink()
        newest = max(run.folder.glob("checkpoints/step_*.ckpt"), key=lambda p: int(p.stem[5:]))
        newest.unlink()
        train(f"resume={run.folder}")
        return (run.folder / "run.log").read_text()

    os.utime(path, (0, 0))
    assert "The training data seem to have changed" not in go_on()
    size = path.stat().st_size
    rows[5:50, 0] = rows[5:50, 0][::-1]
    write()
    assert path.stat().st_size == size
    assert "The training data seem to have changed" in go_on()
