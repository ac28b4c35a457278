"""Files of scripts/new.py pass the linters, train, and pass the test that comes with them."""

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

KINDS = ("experiment", "model", "module", "data")
NAMES = "NAME|CLASS|PACKAGE|MODEL|DATA"
PLACEHOLDER = re.compile(rf"(?<![A-Z])({NAMES})(?![A-Z])")
# In the process that runs the written tests.
COMPOSES = """
from harness import compose

def test_choices_compose():
    for choice in ("experiment=my_experiment", "model=my_module", "model=my_model", "data=my_data"):
        compose("train", [choice])
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
    for path in ("train", "data/_loader", "data/birds", "model/mlp", "model/b"):
        file = tmp_path / "conf" / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
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
    names = ("alpha_1", "zulu", "z", "a" * 16)
    for kind, name in zip(KINDS, names, strict=True):
        paths = written(write(kind, name))
        assert len(paths) == (1 if kind == "experiment" else 3)
        texts = {path: (tmp_path / path).read_text() for path in paths}
        assert not [text for text in texts.values() if PLACEHOLDER.search(text)]
        code += [path for path in paths if path.endswith(".py")]
        with pytest.raises(SystemExit, match="already"):
            write(kind, name)
        assert texts == {path: (tmp_path / path).read_text() for path in paths}
    for checker in (("format", "--check"), ("check",)):
        run(tmp_path, "-m", "ruff", *checker, "--config", str(ROOT / "pyproject.toml"), *code)


def test_an_experiment_names_what_the_project_has(write: Write, tmp_path: Path) -> None:
    """The usual file, or another where that was deleted."""
    write("experiment", "mine")
    text = (tmp_path / "conf" / "experiment" / "mine.yaml").read_text()
    assert "/data: birds\n  - override /model: mlp\n" in text
    (tmp_path / "conf" / "data" / "birds.yaml").unlink()
    with pytest.raises(SystemExit, match="config in conf/data/"):
        write("experiment", "other")


@pytest.mark.slow
def test_starting_points_compose_train_and_pass_their_tests(write: Write, tmp_path: Path) -> None:
    for name in ("conf", "src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    said = "".join(write(kind, f"my_{kind}") for kind in KINDS)
    (tmp_path / "tests" / "test_choices.py").write_text(COMPOSES)
    tests = [path for path in written(said) if path.startswith("tests")]
    run(tmp_path, "-m", "pytest", "-q", "tests/test_choices.py", *tests, "-p", "no:xdist")


def test_what_cannot_be_written_is_refused_with_a_reason(write: Write, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    for words, message in (
        ("module tensor", "The class Tensor would clash.* my_tensor"),
        *((f"data {name}", "my_data") for name in ("My", "class", "../x", "x" * 17, "null")),
    ):
        with pytest.raises(SystemExit, match=message):
            write(*words.split())
        assert sorted(tmp_path.rglob("*")) == before
