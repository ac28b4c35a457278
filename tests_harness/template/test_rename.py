"""scripts/rename_project.py renames the package, and nothing else."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import rename_project
import work_tree
from rename_project import Renamer
from work_tree import File

from tests_harness.conftest import ROOT
from tests_harness.template.conftest import commit, run, succeed, tree

PACKAGE = work_tree.package(tree(ROOT))
OLD, NEW = "study", "a_new_name"
FILES = {
    "src/study/cli.py": File(b""),
    "src/study/models/cnn.py": File(b""),
    "pyproject.toml": File(b'[project]\nname = "study"\n'),
}
# P means the package, D what pip installs, W is only the same word.
CASES = {
    "a.py": [
        "from P import cli",
        "from P.models import cnn as W",
        "import os, P.cli as c",
        "import P\nP.cli.main(P)",
        "def f():\n    import P.cli\n",
        "from a.W import b",
        "from a import W\nW.cli()",
        "W = 1\nf(W=W, W_root=2)",
        "import P\nf(W=a.W.cli)",
        "x = 'P.models.cnn.CNN'",
        "x = 'a._target_=P.nothing.Here'",
        "x = 'P.made_by_a_test'",
        "x = f'{y}: P.cli.{z}'",
        "x = 'import P.cli; from P import cli'",
        "x = 'of this W.'",
        "x = 'W'",
        "x = 'W.yaml', 'my_W.cli', 'a/W.cli'",
        "getLogger('P')",
        "sys.modules['P']",
        "x['W']",
        "x = '_target_=P.Thing'",
        "wandb.init('W')",
        "metadata.version('D')",
        "x = ROOT / 'src' / 'P' / 'cli.py'",
        "x = 1  # src/P/cli.py, see P.cli",
        "# the W. cli",
    ],
    "a.yaml": [
        "_target_: P.models.cnn.CNN",
        "_target_: P.Thing",
        "x: W.Thing",
        "run: pytest --cov=P",
        "W: mine  # name of the W",
    ],
    "a.md": [
        "`P` in `src/P/`, and P.cli",
        "The W. A W/plan, src/W_b",
        "from P import cli",
        "help from W leaders",
        "`python -m P.cli`",
    ],
    "pyproject.toml": [
        '[project]\nname = "D"',
        '[project.scripts]\nD = "P.cli:main"',
        '[tool.x]\nfiles = ["src/P", "P", "P.*"]',
        '[project]\nall = ["D[test]"]\ndescription = "A W"',
    ],
}


@pytest.mark.parametrize(("path", "text"), [(path, t) for path in CASES for t in CASES[path]])
def test_only_what_means_the_package_is_renamed(path: str, text: str) -> None:
    def filled(package: str, distribution: str) -> bytes:
        names = {"P": package, "D": distribution, "W": OLD}
        return re.sub(r"(?<![A-Za-z])[PDW](?![A-Za-z])", lambda m: names[m[0]], text).encode()

    assert Renamer(FILES, OLD, NEW).rename(path, filled(OLD, OLD)) == filled(NEW, "a-new-name")


def test_table_in_pyproject_keeps_its_name() -> None:
    """It is called [project], as the template's own package is."""
    files = {path.replace("study", "project"): file for path, file in FILES.items()}
    files["pyproject.toml"] = File(b'[project]\nname = "project"\n[project.urls]\n')
    there = Renamer(files, "project", NEW).rename("pyproject.toml", files["pyproject.toml"].data)
    assert there == b'[project]\nname = "a-new-name"\n[project.urls]\n'


def test_an_import_that_gets_too_long_is_wrapped() -> None:
    line = "from study.models.cnn import " + ", ".join(f"name_{i}" for i in range(8)) + "\n"
    assert len(line) < 100
    there = Renamer(FILES, OLD, "a_name_of_twenty_chars").rename("a.py", line.encode())
    assert there.decode().startswith(
        "from a_name_of_twenty_chars.models.cnn import (\n    name_0,\n"
    )


@pytest.mark.parametrize("name", ["ab", "my_new_study", "zebras_of_two_cities"])
def test_renamed_repository_is_clean_and_renaming_again_changes_nothing(name: str, clone) -> None:
    """Whether the name is short or long, and wherever it stands in the alphabet."""
    folder = clone()
    before = tree(folder)
    succeed(folder, "python", "scripts/rename_project.py", name)
    renamed = tree(folder)
    assert not (folder / "src" / PACKAGE).exists()
    assert len(renamed) == len(before)
    assert f'name = "{name.replace("_", "-")}"' in (folder / "pyproject.toml").read_text()
    succeed(folder, "ruff", "format", "--check")
    succeed(folder, "ruff", "check")
    commit(folder, "Renamed")
    succeed(folder, "python", "scripts/rename_project.py", name)
    assert tree(folder) == renamed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("1st", "not a name that Python can import"),
        ("my-study", "not a name that Python can import"),
        ("_x", "not a name that Python can import"),
        ("größe", "not a name that Python can import"),
        ("class", "a keyword of Python"),
        ("json", "standard library"),
        ("Json", "standard library"),
        ("torch", "a dependency, or a file or folder"),
        ("sklearn", "a dependency, or a file or folder"),
        ("dateutil", "a dependency, or a file or folder"),
        ("hydra_plugins", "a dependency, or a file or folder"),
        ("pil", "a dependency, or a file or folder"),
        ("pip", "a dependency, or a file or folder"),
        ("tests", "a dependency, or a file or folder"),
        ("train", "a dependency, or a file or folder"),
    ],
)
@pytest.mark.parametrize("options", [[], ["-S"]], ids=["installed", "nothing installed"])
def test_names_that_cannot_be_are_refused(
    name: str, reason: str, options: list[str], clone_once: Path
) -> None:
    """Also in a fresh clone, where no dependency is installed yet."""
    before = tree(clone_once)
    result = run(clone_once, "python", *options, "scripts/rename_project.py", name)
    assert result.returncode == 1
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert tree(clone_once) == before


def test_every_module_of_a_locked_distribution_is_taken() -> None:
    """Also where its name is not that of the distribution, and nothing is installed."""
    files = tree(ROOT)
    locked = {re.sub(r"[-_.]+", "-", name).lower() for name in rename_project.locked(files)}
    modules = {
        module
        for module, names in metadata.packages_distributions().items()
        if module[0].isalpha() and locked & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    }
    assert {"torch", "yaml", "dateutil"} <= modules
    # Without the repository's own imports, which tell of some of them as well.
    lock_alone = {"requirements.lock": files["requirements.lock"]}
    taken = {name.lower() for name in rename_project.taken(lock_alone)}
    assert {module for module in modules if module.lower() not in taken} == set()
    assert set(rename_project.MODULES) <= set(rename_project.locked(files))


@pytest.fixture(scope="module")
def clone_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    succeed(ROOT, "git", "-C", folder, "init", "-q")
    for path, file in tree(ROOT).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(file.data)
        (folder / path).chmod(file.mode)
    commit(folder, "The working tree")
    return folder


def test_changes_that_are_not_committed_are_kept(clone) -> None:
    folder = clone()
    (folder / "train.py").write_text(f"from {PACKAGE}.cli import main  # mine\n")
    result = run(folder, "python", "scripts/rename_project.py", NEW)
    assert result.returncode == 1
    assert "M train.py" in result.stderr
    assert "--force" in result.stderr
    assert (folder / "src" / PACKAGE).exists()
    succeed(folder, "python", "scripts/rename_project.py", NEW, "--force")
    assert (folder / "train.py").read_text() == f"from {NEW}.cli import main  # mine\n"


def test_folder_that_has_the_name_already_is_merged(clone) -> None:
    folder = clone()
    mine, there = folder / "src" / NEW / "mine.py", folder / "src" / NEW / "cli.py"
    mine.parent.mkdir()
    (mine.parent / "__init__.py").touch()
    mine.write_text(f"from {NEW} import cli\n")
    there.write_text("another\n")
    commit(folder, "A folder of that name")
    before = tree(folder)
    refused = run(folder, "python", "scripts/rename_project.py", NEW)
    assert refused.returncode == 1
    assert "both exist and differ" in refused.stderr
    assert tree(folder) == before
    there.unlink()
    commit(folder, "Without the clash")
    succeed(folder, "python", "scripts/rename_project.py", NEW)
    assert mine.read_text() == f"from {NEW} import cli\n"
    assert NEW in there.read_text()
    assert not (folder / "src" / PACKAGE).exists()
