"""Folds are joined: each sample is predicted once, by the run that has not seen it."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from harness import UserError, frozen_files, train
from harness.command import folds
from harness.images.examples import write_shapes
from tests_harness.conftest import ROOT
from tests_harness.faults.fork_server import command

WORDS = (
    "experiment=table", "data.num_folds=3", "strategy=cpu", "trainer.max_epochs=1", "logger=none",
    "trainer.log_every_n_steps=1", "trainer.enable_progress_bar=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prices.csv"
    path.write_text("a,target\n" + "".join(f"{i * 37 % 50},{i}\n" for i in range(50)))
    return path


@pytest.fixture(scope="module")
def runs(prices: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three folds that were started by hand."""
    folder = tmp_path_factory.mktemp("runs")
    words = (*WORDS, f"data.file={prices}", f"output_dir={folder}")
    return [train(*words, f"data.fold={i}", conf=ROOT / "conf").folder for i in range(3)]


def test_each_sample_is_predicted_once_by_its_fold(runs: list[Path]) -> None:
    shown = folds.join([runs[2], runs[0], runs[1]], ROOT / "conf")
    with (runs[0].parent / folds.PREDICTIONS).open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["sample"]) for row in rows] == list(range(50))
    # The target is the row's number: each prediction stands beside what it is of.
    assert [float(row["target"]) for row in rows] == list(range(50))
    errors: dict[str, list[float]] = {}
    for row in rows:
        error = abs(float(row["prediction"]) - float(row["target"]))
        errors.setdefault(row["fold"], []).append(error)
    for fold, run in enumerate(runs):
        mae = json.loads((run / "results.json").read_text())["test/mae"]
        assert sum(errors[str(fold)]) / len(errors[str(fold)]) == pytest.approx(mae, rel=1e-4)
    table = [line.split() for line in shown.splitlines()]
    assert [line[0] for line in table[:6]] == ["fold", "0", "1", "2", "mean", "deviation"]
    column = table[0].index("test/mae")
    values = [float(line[column]) for line in table[1:5]]
    assert sum(values[:3]) / 3 == pytest.approx(values[3], rel=1e-3)


def test_folds_that_do_not_belong_together_are_told(runs: list[Path], prices: Path) -> None:
    conf = ROOT / "conf"
    with pytest.raises(UserError, match=r"Of 3 folds there is no 1.\nTrain with"):
        folds.join([runs[0], runs[2]], conf)
    with pytest.raises(UserError, match="Fold 1 is there twice"):
        folds.join([*runs, twin(runs[1])], conf)
    other = twin(runs[2], "lr: 0.003", "lr: 0.001")
    with pytest.raises(UserError, match=r"belong together: model.optimizer.lr=0.003 in"):
        folds.join([*runs[:2], other], conf)
    young = twin(runs[2])
    (young / "results.json").unlink()
    with pytest.raises(UserError, match=rf"Fold 2 has not finished.\nLet it go on: .*{young.name}"):
        folds.join([*runs[:2], young], conf)
    none = twin(runs[2], "fold: 2", "fold: null")
    with pytest.raises(UserError, match=r"is no fold: it was trained with data\.fold=null"):
        folds.join([*runs[:2], none], conf)
    with pytest.raises(UserError, match="holds no run"):
        folds.join([prices.parent], conf)


def twin(run: Path, before: str = "", after: str = "") -> Path:
    """A copy of a run's folder, with another setting."""
    path = run.parent.parent / f"twin of {run.name} {len(list(run.parent.parent.iterdir()))}"
    shutil.copytree(run, path)
    text = "\n".join((path / "config.yaml").read_text().splitlines()[1:-1])
    frozen_files.write_yaml(path / "config.yaml", text.replace(before, after) + "\n")
    return path


def test_sweep_over_folds_ends_with_the_table(prices: Path, tmp_path: Path) -> None:
    words = (
        "-m",
        *WORDS[:1],
        *WORDS[2:],
        f"data.file={prices}",
        "data.num_folds=2",
        "data.fold=0,1",
    )
    result = command("train.py", *words, f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    assert "50 predictions, each by the fold that tested it" in result.stdout
    (path,) = tmp_path.glob(f"sweeps/*/*/{folds.PREDICTIONS}")
    assert len(path.read_text().splitlines()) == 51


@pytest.mark.parametrize("kind", ["images", "text"])
def test_other_data_have_folds_as_well(kind: str, tmp_path: Path) -> None:
    if kind == "images":
        write_shapes(tmp_path / "shapes", 20)
        words = [f"data.root={tmp_path / 'shapes'}", "data.size=8", "data.packed_size=8"]
        words += ["model.net.layers=[1,1,1,1]", "model.net.width=8", "model.net.num_groups=2"]
    else:
        lines = [f"{i:03} is a number of {'many' * (i % 3)} words" for i in range(100)]
        (tmp_path / "lines.txt").write_text("\n".join(lines))
        words = [f"data.file={tmp_path / 'lines.txt'}", "data.unit=lines", "data.length=32"]
        words += ["model.net.width=8", "model.net.num_layers=1", "model.net.num_heads=2"]
    words += [f"data.cache_dir={tmp_path / 'cache'}", f"output_dir={tmp_path / 'runs'}"]
    words += [f"experiment={kind}", "data.num_folds=2", *WORDS[2:]]
    runs = [train(*words, f"data.fold={i}", conf=ROOT / "conf").folder for i in range(2)]
    assert "100 predictions" in folds.join(runs, ROOT / "conf")
    with (runs[0].parent / folds.PREDICTIONS).open() as file:
        assert [int(row["sample"]) for row in csv.DictReader(file)] == list(range(100))


def test_folds_of_several_seeds_are_joined_by_seed(runs: list[Path], tmp_path: Path) -> None:
    for i, run in enumerate(runs):
        for seed in (1, 2):
            shutil.copytree(
                twin(run, "\nseed: 1\n", f"\nseed: {seed}\n"), tmp_path / "folds" / f"{i}_{seed}"
            )
    shown = folds.join([tmp_path / "folds"], ROOT / "conf")
    assert [line for line in shown.splitlines() if line.startswith("seed")] == ["seed 1", "seed 2"]
    for seed in (1, 2):
        text = (tmp_path / "folds" / f"out_of_fold_seed{seed}.csv").read_text()
        assert len(text.splitlines()) == 51
