"""What scripts/new.py writes is clean, trains, and passes the test that it writes with it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests_harness.conftest import ROOT

NEVER_COPIED = (".git", ".venv", "outputs", "build", "*.egg-info", "__pycache__", ".*_cache")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that tests may write into; its modules come before those that are installed."""
    folder = tmp_path_factory.mktemp("repository") / "copy"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NEVER_COPIED))
    return folder


# `alpha` comes before the modules of this project in the alphabet, `zulu` after them.
@pytest.mark.parametrize("name", ["alpha_1", "zulu", "z", "a" * 16])
@pytest.mark.parametrize("kind", ["experiment", "model", "data"])
def test_starting_point_is_clean_and_refuses_to_overwrite(
    kind: str, name: str, repository: Path
) -> None:
    written = run(repository, "scripts/new.py", kind, name)
    assert written.returncode == 0, written.stderr
    paths = [line.split()[1] for line in written.stdout.splitlines() if line.startswith("wrote")]
    assert f"conf/{kind}/{name}.yaml" in paths
    assert len(paths) == (1 if kind == "experiment" else 3)
    texts = {path: (repository / path).read_text() for path in paths}
    code = [path for path in paths if path.endswith(".py")] or ["train.py"]
    for checker in (["ruff", "format", "--check"], ["ruff", "check"]):
        checked = run(repository, "-m", *checker, *code)
        assert checked.returncode == 0, checked.stdout
    again = run(repository, "scripts/new.py", kind, name)
    assert again.returncode == 1
    assert "already" in again.stderr
    assert texts == {path: (repository / path).read_text() for path in paths}


def test_starting_points_pass_their_tests(repository: Path) -> None:
    """The tests that were written, and those that look at every YAML file."""
    for kind in ("experiment", "model", "data"):
        assert run(repository, "scripts/new.py", kind, f"my_{kind}").returncode == 0
    tests = [
        "tests_harness/data/test_my_data.py",
        "tests_harness/models/test_my_model.py",
        "tests_harness/test_config.py",
    ]
    result = run(repository, "-m", "pytest", "-q", "-rA", *tests, "-k", "my_", "-p", "no:xdist")
    assert result.returncode == 0, result.stdout
    names = ("[experiment=my_experiment]", "test_my_data_trains", "test_my_model_learns")
    assert all(f"{name}\n" in result.stdout for name in names)


@pytest.mark.parametrize(
    "name", ["My", "1st", "class", "a-b", "../x", "", "x" * 17, "true", "null"]
)
def test_names_that_python_cannot_import_are_refused(name: str, repository: Path) -> None:
    before = sorted(repository.rglob("*"))
    result = run(repository, "scripts/new.py", "data", name)
    assert result.returncode == 1
    assert "my_data" in result.stderr
    assert sorted(repository.rglob("*")) == before


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("data", "batch", "data/synthetic.py, which this starts from, uses another Batch"),
        (
            "model",
            "path",
            "tests_harness/models/test_mlp.py, which this starts from, uses another Path",
        ),
        ("model", "test", "Test means something to Python or pytest"),
        ("data", "tests_of_mine", "TestsOfMine means something to Python or pytest"),
        ("model", "exception", "Exception means something to Python or pytest"),
    ],
)
def test_names_whose_class_would_hide_another_are_refused(
    kind: str, name: str, reason: str, repository: Path
) -> None:
    before = sorted(repository.rglob("*"))
    result = run(repository, "scripts/new.py", kind, name)
    assert result.returncode == 1
    assert reason in result.stderr
    assert f"my_{name}" in result.stderr
    assert sorted(repository.rglob("*")) == before


def test_missing_original_is_named(repository: Path, tmp_path: Path) -> None:
    for folder in ("scripts", "conf", "src", "tests"):
        shutil.copytree(repository / folder, tmp_path / folder)
    (tmp_path / "conf" / "model" / "mlp.yaml").unlink()
    result = run(tmp_path, "scripts/new.py", "model", "mine")
    assert result.returncode == 1
    assert "conf/model/mlp.yaml, which this starts from, is gone" in result.stderr
