"""`copier copy` makes a project that is somebody's own; `copier update` keeps it up to date."""

import contextlib
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import rename_project
import work_tree
from make_project import OWN, OWN_WORDS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from remove_examples import EXAMPLES, mentions, words

from tests_harness.conftest import ROOT
from tests_harness.template.conftest import commit, run, succeed, tree

PACKAGE = work_tree.package(tree(ROOT))
ANSWERS = {"name": "striped-horses", "package": "zebra_study_2", "author": "Zoë O'Hara"}
ANSWERS["description"] = 'Stripes, "measured"'


def copier(folder: Path, *arguments: str | Path, **answers: str) -> str:
    """Run copier without questions."""
    data = [f"--data={key}={value}" for key, value in (ANSWERS | answers).items()]
    return succeed(folder, "python", "-m", "copier", *arguments, "--trust", "--defaults", *data)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a repository with a tag, v2; v1 is an older state of it."""
    folder = tmp_path_factory.mktemp("template")
    succeed(folder, "git", "init", "-q", "-b", "main")
    now = tree(ROOT)
    work_tree.write(folder, {}, older(now))
    commit(folder, "Before")
    succeed(folder, "git", "tag", "v1.0.0")
    work_tree.write(folder, older(now), now)
    commit(folder, "The working tree")
    succeed(folder, "git", "tag", "v2.0.0")
    return folder


def older(files: work_tree.Files) -> work_tree.Files:
    """What an earlier version could have been: a file less, a file more, two lines changed."""
    files = dict(files)
    del files["conf/strategy/ddp_spawn.yaml"]
    files["conf/debug/gone.yaml"] = work_tree.File(b"# @package _global_\n# Gone in version 2.\n")
    for path, now, before in OLDER_LINES:
        assert files[path].data.count(now) == 1
        files[path] = files[path]._replace(data=files[path].data.replace(now, before))
    return files


OLDER_LINES = [
    ("conf/trainer/default.yaml", b"max_epochs: 20", b"max_epochs: 10"),
    (f"src/{PACKAGE}/models/mlp.py", b"A fully connected network.", b"A perceptron."),
    ("conf/model/mlp.yaml", b"hidden: [128, 64]", b"hidden: [32]"),
]


@pytest.fixture(scope="session")
def projects(template: Path, tmp_path_factory: pytest.TempPathFactory):
    """Make a project with or without the examples, once."""
    made: dict[bool, Path] = {}

    def make(examples: bool) -> Path:
        if examples not in made:
            made[examples] = tmp_path_factory.mktemp("made") / "zebra-study"
            copier(ROOT, "copy", template, made[examples], examples=str(examples))
        return made[examples]

    return make


@pytest.fixture(params=[True, False], ids=["with examples", "without examples"])
def project(request: pytest.FixtureRequest, projects) -> Path:
    return projects(request.param)


def test_project_has_the_answers_and_a_commit(project: Path) -> None:
    readme = (project / "README.md").read_text()
    assert readme.startswith('# striped-horses\n\nStripes, "measured"\n\n')
    assert "Copyright (c) Zoë O'Hara" in (project / "LICENSE").read_text()
    pyproject = (project / "pyproject.toml").read_text()
    for line in (
        'name = "striped-horses"',
        'description = "Stripes, \\"measured\\""',
        'authors = [{ name = "Zoë O\'Hara" }]',
        'license = "MIT"',
    ):
        assert f"\n{line}\n" in pyproject
    assert succeed(project, "git", "status", "--porcelain") == ""
    assert len(succeed(project, "git", "log", "--oneline").splitlines()) == 1
    modes = {path: file.mode & 0o111 for path, file in tree(project).items()}
    assert modes[".ci/run"]


def test_nothing_of_the_template_is_left(project: Path) -> None:
    files = tree(project)
    answers = files.pop(".copier-answers.yml")
    assert b"_commit: v2.0.0" in answers.data
    own = [path for path in files if any(f"{path}/".startswith(f"{own}/") for own in OWN)]
    assert own == []
    assert mentions(files, words(OWN_WORDS)) == []
    # What is left of the name is the word: [project], and "the project", "of this project".
    the_word = re.compile(
        rf"(?<!this )(?<!the )(?<!a )(?<!no )(?<!\[)(?<!_)\b{PACKAGE}(?![a-z])", re.IGNORECASE
    )
    for path, file in files.items():
        text = " ".join(file.data.decode(errors="replace").split())
        assert [text[m.start() - 20 :][:60] for m in the_word.finditer(text)] == [], path


def test_examples_go_if_they_are_not_wanted(projects) -> None:
    kept, removed = tree(projects(True)), tree(projects(False))
    assert "conf/data/digits.yaml" in kept
    del removed[".copier-answers.yml"]
    assert mentions(removed, words(EXAMPLES)) == []
    assert [path for path in removed if words(EXAMPLES).search(path)] == []


def needed(files: work_tree.Files) -> set[str]:
    """Names of the distributions that pyproject.toml asks for, and of those that these need."""
    lines = re.findall(r'(?m)^  "([\w-]+[<>].*?)"', files["pyproject.toml"].data.decode())
    seen, queue = set[tuple[str, str]](), [(Requirement(line), "") for line in lines]
    while queue:
        requirement, extra = queue.pop()
        marker = requirement.marker
        if marker and "extra" in str(marker) and not marker.evaluate({"extra": extra}):
            continue  # not asked for; what another platform needs counts
        for wanted in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                with contextlib.suppress(metadata.PackageNotFoundError):
                    lines = metadata.requires(name) or []
                    queue += [(Requirement(line), wanted) for line in lines]
    return {name for name, _ in seen}


def test_project_locks_what_it_needs(project: Path) -> None:
    """And nothing that only copier and the examples need."""
    here, there = tree(ROOT), tree(project)
    whole, locked = (
        {canonicalize_name(name) for name in rename_project.locked(files)}
        for files in (here, there)
    )
    assert {"copier", "joblib"} & needed(here) == {"copier", "joblib"}
    assert locked & (needed(here) - needed(there)) == set()
    assert needed(there) & whole <= locked


def test_renaming_a_clone_first_gives_the_same_project(projects, clone, tmp_path: Path) -> None:
    """Byte for byte, but for copier's answers: the rename is the same program."""
    folder = clone()
    succeed(folder, "python", "scripts/rename_project.py", ANSWERS["package"])
    commit(folder, "Renamed")
    arguments = [f"--{key}={value}" for key, value in ANSWERS.items()]
    for examples in (True, False):
        copied, made = tree(projects(examples)), tmp_path / str(examples)
        flag = "--examples" if examples else "--no-examples"
        succeed(folder, "python", "template/make_project.py", made, "--git", flag, *arguments)
        del copied[".copier-answers.yml"]
        assert tree(made) == copied


def test_a_clone_without_examples_is_the_same_skeleton(projects, clone) -> None:
    """What it runs and tests is byte for byte that of a project, whose tests are run below."""
    folder = clone()
    succeed(folder, "python", "scripts/remove_examples.py")
    succeed(folder, "python", "scripts/rename_project.py", ANSWERS["package"], "--force")
    folders = ("src/", "conf/", "tests_harness/")
    mine, theirs = (
        {path: file for path, file in tree(each).items() if path.startswith(folders)}
        for each in (folder, projects(False))
    )
    del mine["tests_harness/test_benchmarks.py"]  # benchmarks/ stay in a clone
    assert mine == theirs


def test_edits_survive_an_update_and_the_template_s_changes_arrive(
    template: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "zebra-study"
    copier(tmp_path, "copy", "--vcs-ref=v1.0.0", template, folder)
    package = folder / "src" / "zebra_study_2"
    assert (folder / "conf" / "debug" / "gone.yaml").exists()
    assert not (folder / "conf" / "strategy" / "ddp_spawn.yaml").exists()
    mine = {
        "src/zebra_study_2/models/mine.py": "from zebra_study_2.models.mlp import MLP\n",
        "benchmarks/mine.py": "print('mine')\n",  # a folder that the template has as well
        "CHANGELOG.md": "# Mine\n",
        "docs/digits.md": f"# Digits\n\nThe {PACKAGE}.models of another {PACKAGE}. copier\n",
    }
    for path, text in mine.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    edit(folder / "conf/trainer/default.yaml", "log_every_n_steps: 10", "log_every_n_steps: 7")
    edit(package / "models/mlp.py", "nn.GELU()", "nn.ReLU()")
    edit(folder / "conf/model/mlp.yaml", "hidden: [32]", "hidden: [16]")
    edit(folder / "README.md", 'Stripes, "measured"', "Stripes of zebras, by us.")
    (folder / "conf" / "strategy" / "dp.yaml").unlink()
    commit(folder, "Mine")
    before = tree(folder)

    succeed(folder, "python", "-m", "copier", "update", "--trust", "--defaults")

    after = tree(folder)
    assert {path: after[path] for path in mine} == {path: before[path] for path in mine}
    trainer = (folder / "conf/trainer/default.yaml").read_text()
    assert "log_every_n_steps: 7" in trainer
    assert "max_epochs: 20" in trainer
    mlp = (package / "models/mlp.py").read_text()
    assert "nn.ReLU()" in mlp
    assert "A fully connected network." in mlp
    assert "Stripes of zebras, by us." in (folder / "README.md").read_text()
    assert (folder / "conf" / "strategy" / "ddp_spawn.yaml").exists()
    assert not (folder / "conf" / "strategy" / "dp.yaml").exists()
    assert not (folder / "conf" / "debug" / "gone.yaml").exists()
    assert not (folder / "src" / PACKAGE).exists()
    # Where both changed a line, git's ordinary conflict.
    conflict = (folder / "conf/model/mlp.yaml").read_text()
    assert re.search(
        r"<<<<<<<.*hidden: \[16\].*=======.*hidden: \[128, 64\].*>>>>>>>", conflict, re.S
    )
    assert succeed(folder, "git", "diff", "--name-only", "--diff-filter=U").split() == [
        "conf/model/mlp.yaml"
    ]
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    assert changed == {
        *(path.replace(PACKAGE, "zebra_study_2", 1) for path, _, _ in OLDER_LINES),
        *("conf/strategy/ddp_spawn.yaml", "conf/debug/gone.yaml", ".copier-answers.yml"),
    }


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_examples_can_go_later(template: Path, tmp_path: Path) -> None:
    folder = tmp_path / "zebra-study"
    copier(tmp_path, "copy", template, folder)
    (folder / "mine.py").write_text("print('digits')\n")
    commit(folder, "Mine")
    update = ("update", "--trust", "--defaults", "--data=examples=false")
    succeed(folder, "python", "-m", "copier", *update)
    assert not (folder / "conf" / "data" / "digits.yaml").exists()
    assert (folder / "mine.py").read_text() == "print('digits')\n"
    assert "- data: synthetic" in (folder / "conf" / "train.yaml").read_text()


def test_files_that_are_there_are_not_lost(template: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine\n")
    words = ("copier", "copy", template, tmp_path, "--trust", "--defaults")
    result = run(tmp_path, "python", "-m", *words)
    assert result.returncode != 0
    assert "files that would be lost: train.py" in result.stdout + result.stderr
    assert (tmp_path / "train.py").read_text() == "mine\n"
    assert not (tmp_path / "conf").exists()


@pytest.mark.parametrize(
    ("folder", "name", "package"),
    [
        ("My Study 2", "My-Study-2", "my_study_2"),
        ("2024-zoo", "2024-zoo", "zoo"),
        ("_2024_", "2024", "my_study"),
        ("änderung", "nderung", "nderung"),
        ("é", "my-study", "my_study"),
    ],
)
def test_default_answers_of_any_folder_are_valid(
    folder: str, name: str, package: str, template: Path, tmp_path: Path
) -> None:
    words = ("copy", "--trust", "--defaults", "--skip-tasks", template, tmp_path / folder)
    succeed(tmp_path, "python", "-m", "copier", *words)
    answers = (tmp_path / folder / ".copier-answers.yml").read_text()
    assert re.search(rf"(?m)^name: '?{name}'?$", answers)
    assert re.search(rf"(?m)^package: {package}$", answers)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"package": "torch"}, "torch is a dependency"),
        ({"package": "my-study"}, "such as my_study"),
        ({"package": "class"}, "a keyword of Python"),
        ({"name": "my study!"}, "such as my-study"),
        ({"name": "Torch"}, "Torch is a dependency of the project"),
        ({"name": "scikit_learn"}, "scikit_learn is a dependency of the project"),
        ({"package": "dateutil"}, "dateutil is a dependency"),
    ],
)
def test_answers_that_cannot_be_are_refused(
    answer: dict[str, str], reason: str, template: Path, tmp_path: Path
) -> None:
    data = [f"--data={key}={value}" for key, value in (ANSWERS | answer).items()]
    words = ("copier", "copy", template, tmp_path / "new", "--trust", "--defaults", *data)
    result = run(tmp_path, "python", "-m", *words)
    assert result.returncode != 0
    assert reason in " ".join((result.stdout + result.stderr).split())
    assert not (tmp_path / "new" / "train.py").exists()


def test_licences(template: Path, tmp_path: Path) -> None:
    for licence, opening in (("Apache-2.0", "Apache License"), ("BSD-3-Clause", "BSD 3-Clause")):
        copier(tmp_path, "copy", template, tmp_path / licence, license=licence)
        text = (tmp_path / licence / "LICENSE").read_text()
        assert opening in text
        assert "Copyright (c) Zoë O'Hara" in text or "Copyright Zoë O'Hara" in text
        assert f'license = "{licence}"' in (tmp_path / licence / "pyproject.toml").read_text()
    copier(tmp_path, "copy", template, tmp_path / "none", license="none", git="false")
    assert not (tmp_path / "none" / "LICENSE").exists()
    assert "license =" not in (tmp_path / "none" / "pyproject.toml").read_text()
    assert not (tmp_path / "none" / ".git").exists()


def environment_beside(project: Path, folder: Path) -> Path:
    """Make an environment that has the project, and its dependencies from this environment."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file brings packages, and not what is installed there as editable: not us.
    folders = [project / "src", *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "project.pth").write_text("".join(f"{path}\n" for path in folders))
    return folder / "bin" / "python"


# What says most about the whole in little time; `whole_suite` runs all of a project's tests.
QUICK = (
    "tests_harness/data",
    "tests_harness/models",
    "tests_harness/loggers",
    "tests_harness/callbacks",
    "tests_harness/test_config.py",
)


def check_and_train(project: Path, python: Path) -> None:
    """Run a project's checks, some of its tests and an epoch of training."""
    missing = run(project, python, "-c", f"import {PACKAGE}")
    assert "ModuleNotFoundError" in missing.stderr
    if (ROOT / ".mypy_cache").exists():  # what it knows of the dependencies saves a minute
        shutil.copytree(ROOT / ".mypy_cache", project / ".mypy_cache", dirs_exist_ok=True)
    for checker in (["ruff", "format", "--check"], ["ruff", "check"], ["mypy"]):
        succeed(project, python, "-m", *checker, timeout=500)
    training = ("train.py", "trainer.max_epochs=1", "strategy=cpu")
    trained = succeed(project, python, *training, timeout=500)
    assert "test/accuracy" in trained
    succeed(project, python, "-m", "pytest", "-q", "-p", "no:xdist", *QUICK, timeout=500)
    assert succeed(project, "git", "status", "--porcelain") == ""


@pytest.mark.timeout(1200)
def test_project_is_clean_passes_its_tests_and_trains(project: Path, tmp_path: Path) -> None:
    check_and_train(project, environment_beside(project, tmp_path / "environment"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_project_works_in_an_environment_of_its_own(projects, tmp_path: Path) -> None:
    """All packages come from pip, or its cache: what the project needs, it says."""
    project, environment = projects(False), tmp_path / "environment"
    started = time.monotonic()
    try:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        python = environment / "bin" / "python"
        install = ("install", "-q", "-c", "requirements.lock", "-e", ".[test]")
        succeed(project, python, "-m", "pip", *install, timeout=1200)
        installed = time.monotonic()
        check_and_train(project, python)
        print(f"installed in {installed - started:.0f} s,", end=" ")
        print(f"checked, tested and trained in {time.monotonic() - installed:.0f} s")
    finally:
        shutil.rmtree(environment)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_whole_suite_of_a_project_passes(project: Path, tmp_path: Path) -> None:
    python = environment_beside(project, tmp_path / "environment")
    tests = ("pytest", "-q", "-n", "2", "--dist", "worksteal")
    print(succeed(project, python, "-m", *tests, timeout=5000)[-200:])
