"""A project is the harness as it is, and the owner's room under the name of its package."""

import re
from importlib import metadata
from pathlib import Path

from template.make_project import (
    EXAMPLES,
    LEFT_OUT,
    OTHER_MODULES,
    PACKAGE,
    is_example,
    locked,
    normalized,
    package_pattern,
    read,
)
from template.tests.conftest import ROOT, make, run, succeed


def test_the_harness_goes_over_as_it_is(project: Path) -> None:
    """So do documentation and tools: an update merges them without a question."""
    here, there = read(ROOT), read(project)
    for room in ("harness/src/", "harness/docs/", ".ci/", ".github/", "scripts/slurm/"):
        names = [path for path in here if path.startswith(room) and not path.startswith(LEFT_OUT)]
        assert names
        assert [path for path in names if there.get(path) != here[path]] == []
        pattern = package_pattern(here)
        assert [path for path in names if pattern.search(here[path].data)] == []
    assert there["Makefile"] == here["Makefile"]


def test_nothing_of_the_template_is_left(project: Path) -> None:
    there = read(project)
    written = {"README.md", "LICENSE"}
    left_out = [path for path in (*LEFT_OUT, "harness/tests") if path not in written]
    assert [path for path in there if path.startswith(tuple(left_out))] == []
    # What is left of the package's name is the word: [project], "the project", "of this project",
    # and a tracker's setting, project: ${name}.
    the_word = re.compile(
        rf"(?<!this )(?<!the )(?<!a )(?<!\[)(?<!_)\b{PACKAGE}(?!_cache|[a-z']|: \$)", re.I
    )
    for path, file in there.items():
        if path.startswith("harness/"):
            continue
        text = " ".join(file.data.decode().split())
        assert [text[m.start() - 20 :][:60] for m in the_word.finditer(text)] == [], path


def test_project_has_the_answers_and_a_commit(project: Path) -> None:
    readme = (project / "README.md").read_text()
    assert readme.startswith('# striped-horses\n\nStripes, "measured"\n\nA study')
    assert "src/zebra_study_2/" in readme
    assert "Copyright (c) Zoë O'Hara" in (project / "LICENSE").read_text()
    pyproject = (project / "pyproject.toml").read_text()
    for line in (
        'name = "striped-horses"',
        'description = "Stripes, \\"measured\\""',
        'authors = [{ name = "Zoë O\'Hara" }]',
        'license = "MIT"',
    ):
        assert f"\n{line}\n" in pyproject
    assert 'version = "0.1.0"' in pyproject  # whichever the template's is
    assert "`src/zebra_study_2/`: models" in (project / "AGENTS.md").read_text()
    assert succeed(project, "git", "status", "--porcelain") == ""
    assert len(succeed(project, "git", "log", "--oneline").splitlines()) == 1
    assert read(project)[".ci/run"].mode & 0o111


def test_every_page_s_links_lead_somewhere(skeleton: Path) -> None:
    for page in (skeleton / "README.md", *(skeleton / "harness").rglob("*.md")):
        links = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    named = re.findall(
        r"`((?:conf|src|scripts|harness)/[^`]+)`", (skeleton / "README.md").read_text()
    )
    named = [name for name in named if "mine" not in name]
    assert len(named) > 3
    assert [name for name in named if not (skeleton / name).exists()] == []


def test_examples_go_by_their_names_and_nothing_else_needs_them(
    project: Path, skeleton: Path
) -> None:
    whole, without = read(project), read(skeleton)
    assert {path for path in whole if is_example(path)} == whole.keys() - without.keys()
    assert "conf/data/digits.yaml" in whole
    assert {path: whole[path] for path in without} == without
    mentioned = re.compile(rf"(?<![a-z])({'|'.join(EXAMPLES)})(?![a-z])".encode(), re.I)
    pages = "harness/docs/"  # they tell what was measured with them
    found = {path for path, file in without.items() if mentioned.search(file.data)}
    assert not [path for path in found if not path.startswith(pages)]


def test_tests_of_the_harness_come_along_if_asked(skeleton: Path, tmp_path: Path) -> None:
    asked = read(make(tmp_path / "asked", "--no-examples", "--harness-tests"))
    more = asked.keys() - read(skeleton).keys()
    assert "harness/tests/test_training.py" in more
    assert [path for path in more if not path.startswith("harness/tests/")] == []
    assert [path for path in more if path.startswith(LEFT_OUT)] == []


def test_licences(tmp_path: Path) -> None:
    made = make(tmp_path / "apache", "--license=Apache-2.0")
    assert "Apache License" in (made / "LICENSE").read_text()
    assert "Copyright Zoë O'Hara" in (made / "LICENSE").read_text()
    assert 'license = "Apache-2.0"' in (made / "pyproject.toml").read_text()
    made = make(tmp_path / "none", "--license=none", "--no-git")
    assert not (made / "LICENSE").exists()
    assert "license =" not in (made / "pyproject.toml").read_text()
    assert not (made / ".git").exists()


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Also where no dependency is installed: -S."""
    taken = "a dependency, or a file or folder"
    for flag, reason in {
        "--package=my-study": "not a name that Python can import",
        "--package=_x": "not a name that Python can import",
        "--package=class": "a keyword of Python",
        "--package=Json": "standard library",
        **dict.fromkeys([f"--package={n}" for n in ("torch", "pil", "harness", "tests")], taken),
        "--name=Torch": "Torch is a dependency of the project",
        "--name=my study!": "not a name for pip",
    }.items():
        words = ("--name=my-study", "--package=my_study", flag)
        result = run(ROOT, "python", "-S", "template/make_project.py", tmp_path / "new", *words)
        assert result.returncode == 1
        assert reason in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_every_module_of_a_locked_distribution_is_taken() -> None:
    """Also where its name is not that of the distribution."""
    distributions = locked(read(ROOT))
    modules = {
        module
        for module, names in metadata.packages_distributions().items()
        if module[0].isalpha() and distributions & {normalized(name) for name in names}
    }
    assert {"torch", "yaml", "dateutil"} <= modules
    taken = {name.replace("-", "_") for name in distributions} | {n.lower() for n in OTHER_MODULES}
    assert {module for module in modules if module.lower() not in taken} == set()


def test_files_that_are_there_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine\n")
    words = ("--name=my-study", "--package=my_study")
    result = run(ROOT, "python", "template/make_project.py", tmp_path, *words)
    assert result.returncode == 1
    assert "files that would be lost: train.py" in result.stderr
    assert (tmp_path / "train.py").read_text() == "mine\n"
    assert not (tmp_path / "conf").exists()
