"""What scripts/new.py writes is clean, trains, and passes the test that comes with it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import new
import pytest

from tests_harness.conftest import ROOT

KINDS = {kind: (kind,) for kind in ("experiment", "model", "module", "data")} | {"csv": ("data",)}
CSV = {"csv": ("--csv", "houses.csv")}
WORDS = "NAME|CLASS|PACKAGE|PATH|TARGET|COLUMNS|TRUTH|MODEL"
PLACEHOLDER = re.compile(rf"(?<![A-Z])({WORDS})(?![A-Z])")
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
    rows = "\n".join(f"{i},{i % 7},{3 * i}" for i in range(40))
    (folder / "houses.csv").write_text(f"size,rooms,price\n{rows}\n")
    return folder


@pytest.mark.parametrize("name", ["alpha_1", "zulu", "z", "a" * 16])
@pytest.mark.parametrize("kind", ["experiment", "model", "module", "data", "csv"])
def test_starting_point_is_clean_and_refuses_to_overwrite(
    kind: str, name: str, repository: Path
) -> None:
    words = ("scripts/new.py", *KINDS[kind], f"{name[:15]}{kind[-1]}", *CSV.get(kind, ()))
    written = run(repository, *words)
    assert written.returncode == 0, written.stderr
    paths = [line.split()[1] for line in written.stdout.splitlines() if line.startswith("wrote")]
    assert len(paths) == {"experiment": 1, "csv": 2}.get(kind, 3)
    texts = {path: (repository / path).read_text() for path in paths}
    assert not [text for text in texts.values() if PLACEHOLDER.search(text)]
    code = [path for path in paths if path.endswith(".py")] or ["train.py"]
    for checker in (["ruff", "format", "--check"], ["ruff", "check"]):
        checked = run(repository, "-m", *checker, *code)
        assert checked.returncode == 0, checked.stdout
    again = run(repository, *words)
    assert again.returncode == 1
    assert "already" in again.stderr
    assert texts == {path: (repository / path).read_text() for path in paths}


def test_starting_points_pass_their_tests_and_type_checks(repository: Path) -> None:
    """The tests that were written, and those that look at every YAML file."""
    tests, sources = ["tests/test_config.py"], []
    for kind in KINDS:
        words = ("scripts/new.py", *KINDS[kind], f"my_{kind}", *CSV.get(kind, ()))
        written = run(repository, *words)
        assert written.returncode == 0, written.stderr
        tests += re.findall(r"(?m)^wrote  (tests/.*)", written.stdout)
        sources += re.findall(r"(?m)^wrote  (src/.*)", written.stdout)
    result = run(repository, "-m", "pytest", "-q", "-rA", *tests, "-k", "my_", "-p", "no:xdist")
    assert result.returncode == 0, result.stdout
    choices = ("experiment=my_experiment", "model=my_module", "data=my_csv")
    names = (*(f"[{choice}]" for choice in choices), "test_my_data_trains", "test_my_module_learns")
    assert all(f"{name}\n" in result.stdout for name in names)
    checked = run(repository, "-m", "mypy", *sources)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("package", ["alpha", "zulu"])
def test_imports_are_sorted_whatever_the_package_is_called(package: str) -> None:
    """`alpha` comes before `harness` in the alphabet, `zulu` after it."""
    words = {"NAME": "mine", "CLASS": "Mine", "PACKAGE": package}
    for template in new.TEMPLATES.glob("*.py.txt"):
        lines = new.filled(template.read_text(), words).splitlines()
        own = [line for line in lines if line.startswith(("from harness", f"from {package}"))]
        assert own == sorted(own), template


def test_a_table_trains_as_the_printed_command_says(repository: Path) -> None:
    written = run(repository, "scripts/new.py", "data", "prices", "--csv", "houses.csv")
    (command,) = re.findall(r"(?m)^run    python (.*)", written.stdout)
    short = ("trainer.max_epochs=1", "trainer.log_every_n_steps=1")
    trained = run(repository, *command.split(), *short)
    assert trained.returncode == 0, trained.stderr
    assert "test/mae" in trained.stdout


@pytest.mark.parametrize(
    ("targets", "model"),
    [
        (["cat", "dog", ""], "table_mlp"),
        (["0", "1", "2"], "table_mlp"),
        (["0.5", "1", "2"], "table_regressor"),
        (list(map(str, range(30))), "table_regressor"),
    ],
)
def test_the_last_column_decides_the_model(targets: list[str], model: str, tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("city,y\n" + "".join(f"Rome,{target}\n" for target in targets * 4))
    columns, are_classes = new.read_columns(str(table))
    assert columns == ["city", "y"]
    assert are_classes is (model == "table_mlp")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data", "mine", "--csv", "nope.csv"), "--csv nope.csv cannot be read"),
        (("data", "mine", "--csv", "LICENSE"), "must begin with the names of two columns"),
        (("model", "mine", "--csv", "houses.csv"), "--csv belongs to data, not to model"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(
    words: tuple[str, ...], message: str, repository: Path
) -> None:
    result = run(repository, "scripts/new.py", *words)
    assert result.returncode == 1
    assert message in result.stderr
    assert not (repository / "conf" / "data" / "mine.yaml").exists()


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
        ("data", "samples", "The new file uses another Samples"),
        ("module", "tensor", "The new file uses another Tensor"),
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
