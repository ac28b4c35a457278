"""Whole runs on class folders, as the commands make them."""

import csv
from pathlib import Path

import pytest
import torch

from harness import UserError, evaluate, load_run, predict, train
from tests.conftest import ROOT
from tests.faults.fork_server import command
from tests.faults.run_folder import leave_at
from tests.images.made import CLASSES, words, write_images
from tests.strategy_runs import farthest, outcome, run_of

CONF = ROOT / "conf"


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "pets")


def result_of(root: Path, strategy: str, folder: Path, *more: str) -> Path:
    chosen = [word for word in words(root, "name=run", *more) if not word.startswith("strategy")]
    return run_of(chosen, strategy, folder)


def test_augmented_training_is_the_same_under_every_strategy(pets: Path, tmp_path: Path) -> None:
    expected = outcome(result_of(pets, "cpu", tmp_path / "one"))
    for strategy in ("dp(2)", "ddp(2)"):
        found = outcome(result_of(pets, strategy, tmp_path / strategy.partition("(")[0]))
        assert farthest(expected, found) < 1e-6, strategy
    plain = outcome(result_of(pets, "cpu", tmp_path / "plain", "data.augment=false"))
    assert farthest(expected, plain) > 1e-3


def test_run_goes_on_inside_an_epoch_as_if_it_had_not_stopped(pets: Path, tmp_path: Path) -> None:
    more = ("data.num_workers=1", "data.cache=false")
    kept = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=100")
    run_dir = result_of(pets, "cpu", tmp_path, *kept, *more)
    expected = outcome(run_dir)
    leave_at(run_dir, 6)  # of 4 in each of 2 epochs
    chosen = words(pets, "name=run", *kept, *more, f"resume={run_dir}")
    assert farthest(expected, outcome(run_of(chosen, "cpu", tmp_path))) == 0


def test_run_is_evaluated_predicts_and_is_loaded(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets")
    more = ["trainer.max_epochs=12", "model.net.width=16", f"output_dir={tmp_path}"]
    run = train(*words(root, *more), conf=CONF)
    assert run.results["test/accuracy"] > 0.8  # the colour tells the class
    assert list(run.folder.glob("tensorboard/*"))
    again = evaluate(run.checkpoint, conf=CONF).results
    assert again["test/loss"] == pytest.approx(run.results["test/loss"], abs=1e-6)
    assert load_run(run.folder).model(torch.zeros(2, 3, 16, 16)).shape == (2, 3)

    def table(*more: str) -> list[dict[str, str]]:
        path = predict(run.checkpoint, f"output={tmp_path / 'table.csv'}", *more, conf=CONF)
        with path.open() as file:
            return list(csv.DictReader(file))

    rows = table()
    assert {row["file"].partition("/")[0] for row in rows} == set(CLASSES)
    assert all(row["label"] == row["file"].partition("/")[0] for row in rows)
    assert {f"p_{name}" for name in CLASSES} <= rows[0].keys()
    new = write_images(tmp_path / "new" / "deep", num=2)
    rows = table(f"data.predict_root={new.parent}")
    assert [row["file"] for row in rows][:3] == [
        "deep/bird/000.jpg",
        "deep/bird/001.jpg",
        "deep/cat/000.jpg",
    ]
    assert [row["prediction"] for row in rows] == [c for c in CLASSES for _ in "12"]


def test_class_that_only_the_test_has_is_refused_before_training(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        write_images(tmp_path / "pets" / split)
    (tmp_path / "pets" / "test" / "bird").rename(tmp_path / "pets" / "test" / "brid")
    with pytest.raises(UserError, match="has images of brid, which training did not have"):
        train(*words(tmp_path / "pets", f"output_dir={tmp_path / 'out'}"), conf=CONF)
    assert not list(tmp_path.glob("out/*/*/metrics.csv"))


def test_damaged_file_is_told_in_lines_and_leaves_no_run(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets")
    file = root / "cat" / "003.jpg"
    file.write_bytes(file.read_bytes()[:-200])
    result = command("train.py", *words(root, f"output_dir={tmp_path / 'out'}"))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert 1 <= result.stderr.count("\n") <= 3, result.stderr
    # The other images were packed: with data.unreadable=skip that is used.
    assert len(list(tmp_path.glob("cache/*/index.json"))) == 1
    assert not list(tmp_path.glob("cache/*.part"))
    assert not list(tmp_path.glob("out/*/*"))
