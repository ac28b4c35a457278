"""What scripts/new.py writes is clean, trains, and passes the test that comes with it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.new import __main__ as new
from tests.conftest import LIBRARY, ROOT

KINDS = {kind: (kind,) for kind in ("experiment", "model", "module", "data")} | {"csv": ("data",)}
CSV = {"csv": ("--csv", "houses.csv")}
WORDS = "NAME|CLASS|PACKAGE|PATH|TARGET|COLUMNS|TRUTH|MODEL"
PLACEHOLDER = re.compile(rf"(?<![A-Z])({WORDS})(?![A-Z])")
# What the printed command does, in the process that runs the written tests.
TRAINS = """
from harness import compose, train

def test_choices_compose():
    for choice in ("experiment=my_experiment", "model=my_module", "model=my_model", "data=my_data"):
        compose("train", [choice])

def test_table_trains(tmp_path):
    short = ("trainer.max_epochs=1", "trainer.log_every_n_steps=1", "strategy=cpu")
    assert "test/mae" in train(*{words}, *short, f"output_dir={{tmp_path}}").results
"""
Write = Callable[..., str]


def run(folder: Path, *arguments: str) -> None:
    path = os.pathsep.join([str(folder / "src"), str(LIBRARY / "src")])
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture
def write(tmp_path: Path, monkeypatch, capsys) -> Write:
    """Call new.py for a project in ``tmp_path``; return what it prints."""
    (tmp_path / "src" / "project").mkdir(parents=True)
    (tmp_path / "src" / "project" / "__init__.py").touch()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").touch()
    rows = "\n".join(f"{i},{i % 7},{3 * i}" for i in range(40))
    (tmp_path / "houses.csv").write_text(f"size,rooms,price\n{rows}\n")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["scripts/new.py", *words])
        capsys.readouterr()
        new.main()
        return capsys.readouterr().out

    return call


def written(said: str) -> list[str]:
    """The paths of files that were written, by what was printed."""
    return re.findall(r"(?m)^wrote  (.*)", said)


def test_starting_points_are_clean_and_refuse_to_overwrite(write: Write, tmp_path: Path) -> None:
    code = []
    names = ("alpha_1", "zulu", "z", "a" * 16, "b2")
    for (kind, words), name in zip(KINDS.items(), names, strict=True):
        paths = written(write(*words, name, *CSV.get(kind, ())))
        assert len(paths) == {"experiment": 1, "csv": 2}.get(kind, 3)
        texts = {path: (tmp_path / path).read_text() for path in paths}
        assert not [text for text in texts.values() if PLACEHOLDER.search(text)]
        code += [path for path in paths if path.endswith(".py")]
        with pytest.raises(SystemExit, match="already"):
            write(*words, name, *CSV.get(kind, ()))
        assert texts == {path: (tmp_path / path).read_text() for path in paths}
    for checker in (("format", "--check"), ("check",)):
        run(tmp_path, "-m", "ruff", *checker, "--config", str(ROOT / "pyproject.toml"), *code)


@pytest.mark.slow
def test_starting_points_compose_train_and_pass_their_tests(write: Write, tmp_path: Path) -> None:
    run(tmp_path, "-m", "pytest", "-q", *write_all(write, tmp_path), "-p", "no:xdist")


def write_all(write: Write, folder: Path) -> list[str]:
    """Write a file of each kind into a copy of this project; return the tests of them."""
    for name in ("conf", "src", "tests"):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    said = {kind: write(*KINDS[kind], f"my_{kind}", *CSV.get(kind, ())) for kind in KINDS}
    (command,) = re.findall(r"(?m)^run    python train.py (.*)", said["csv"])
    (folder / "tests" / "test_my_table.py").write_text(TRAINS.format(words=command.split()))
    mine = [path for text in said.values() for path in written(text) if path.startswith("tests")]
    return ["tests/test_my_table.py", *mine]


def test_the_last_column_decides_the_model(tmp_path: Path) -> None:
    for targets, expected in (
        (["cat", "dog", ""], "table_mlp"),
        (["0", "1", "2"], "table_mlp"),
        (["0.5", "1", "2"], "table_regressor"),
        (list(map(str, range(30))), "table_regressor"),
    ):
        table = tmp_path / "t.csv"
        table.write_text("city,y\n" + "".join(f"Rome,{target}\n" for target in targets * 4))
        assert new.words_of_table(table)["MODEL"] == expected


def test_what_cannot_be_written_is_refused_with_a_reason(write: Write, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("MIT\n")
    before = sorted(tmp_path.rglob("*"))
    for words, message in (
        (("data", "mine", "--csv", "nope.csv"), "--csv nope.csv cannot be read"),
        (("data", "mine", "--csv", "LICENSE"), "needs two named columns or more"),
        (("model", "mine", "--csv", "houses.csv"), "--csv belongs to data, not to model"),
        (("module", "tensor"), "The new file uses another Tensor.* my_tensor"),
        *((("data", name), "my_data") for name in ("My", "class", "../x", "", "x" * 17, "null")),
    ):
        with pytest.raises(SystemExit, match=message):
            write(*words)
        assert sorted(tmp_path.rglob("*")) == before
