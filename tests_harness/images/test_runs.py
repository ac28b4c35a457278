"""Whole runs on class folders, as the commands make them."""

import csv
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from harness import UserError, evaluate, load_run, predict, train
from tests_harness.conftest import ROOT
from tests_harness.faults.fork_server import command
from tests_harness.faults.run_folder import leave_at
from tests_harness.images.made import CLASSES, words, write_images
from tests_harness.strategy_runs import SAME, distances, execute, farthest, outcome

CONF = ROOT / "conf"


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "pets")


def result_of(root: Path, strategy: str, folder: Path, *more: str) -> Path:
    chosen = [word for word in words(root, "name=run", *more) if not word.startswith("strategy")]
    status, said = execute(chosen, strategy, folder)
    assert status == 0, said
    (run_dir,) = (folder / "run").iterdir()
    return run_dir


def test_augmented_training_is_the_same_under_every_strategy(pets: Path, tmp_path: Path) -> None:
    expected = outcome(result_of(pets, "cpu", tmp_path / "one"))
    for strategy in ("dp(2)", "ddp(2)"):
        found = outcome(result_of(pets, strategy, tmp_path / strategy.partition("(")[0]))
        assert farthest(expected, found) < SAME, strategy
    plain = outcome(result_of(pets, "cpu", tmp_path / "plain", "data.augment=false"))
    assert farthest(expected, plain) > 1e-3


def test_run_goes_on_inside_an_epoch_as_if_it_had_not_stopped(pets: Path, tmp_path: Path) -> None:
    more = ("data.num_workers=1", "data.cache=false")
    kept = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=100")
    run_dir = result_of(pets, "cpu", tmp_path, *kept, *more)
    expected = outcome(run_dir)
    leave_at(run_dir, 6)  # of 4 in each of 2 epochs
    chosen = words(pets, "name=run", *kept, *more, f"resume={run_dir}")
    status, said = execute(chosen, "cpu", tmp_path)
    assert status == 0, said
    assert set(distances(expected, outcome(run_dir)).values()) == {0.0}


def test_run_is_evaluated_predicts_and_is_loaded(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets")
    more = ["trainer.max_epochs=12", "model.net.width=16", f"output_dir={tmp_path}"]
    run = train(*words(root, *more), conf=CONF)
    assert run.results["test/accuracy"] == 1.0  # the colour tells the class
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


def test_command_alone_says_what_to_give() -> None:
    result = command("train.py", "experiment=images")
    assert result.returncode == 1
    assert result.stderr == "data.root has no value. Add data.root=<value>.\n"


def test_mistake_is_told_in_lines_and_leaves_nothing(tmp_path: Path) -> None:
    def cut_off(root: Path) -> None:
        file = root / "cat" / "003.jpg"
        file.write_bytes(file.read_bytes()[:-200])

    def add_bomb(root: Path) -> None:
        side = math.isqrt(Image.MAX_IMAGE_PIXELS or 0) + 1
        Image.new("1", (side, side)).save(root / "cat" / "bomb.png")

    for i, (change, word) in enumerate(
        (
            (shutil.rmtree, "data.size=16"),
            (lambda root: write_images(root, num=1, classes=("emu",)), "data.size=16"),
            (cut_off, "data.size=16"),
            (add_bomb, "data.size=16"),
            (lambda root: None, "data.packed_size=1"),
        )
    ):
        root = write_images(tmp_path / str(i) / "pets")
        change(root)
        result = command("train.py", *words(root, word, f"output_dir={tmp_path / 'out'}"))
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
        assert 1 <= result.stderr.count("\n") <= 3, result.stderr
        # The images of a damaged file were packed: with data.unreadable=skip that is used.
        is_packed = change in (cut_off, add_bomb)
        assert len(list(root.parent.glob("cache/*/index.json"))) == is_packed
        assert not list(root.parent.glob("cache/*.part"))
        assert not list(tmp_path.glob("out/*/*"))


class Vanishing(pl.Callback):
    """Removes a class's files in the middle of training."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, *_: Any) -> None:
        for path in Path(self.folder).iterdir():
            path.unlink(missing_ok=True)


@pytest.mark.slow
def test_file_that_vanishes_in_the_middle_of_a_run_is_named(tmp_path: Path) -> None:
    root = write_images(tmp_path / "pets")
    callback = f"{{_target_: {__name__}.Vanishing, folder: {root / 'cat'}}}"
    more = ["data.cache=false", "data.num_workers=1", f"+callbacks.mine={callback}"]
    result = command("train.py", *words(root, *more, f"output_dir={tmp_path}"))
    assert result.returncode == 1
    first, second = result.stderr.strip().split("\n")
    assert re.search(r"cat/\d+.jpg could be read when the run began, and cannot now", first)
    assert second.startswith("Put it back")
