"""A project is the library, and the user's files under the name of their package."""

import re
import tomllib
from pathlib import Path

from template.make_project import FILES
from template.tests.conftest import ROOT, make, run, succeed, tracked


def test_the_harness_goes_over_as_it_is(project: Path) -> None:
    """So do tools: an update merges them without a question."""
    here, there = tracked(ROOT), tracked(project)
    left_out = tuple(FILES["left_out"])
    for folder in ("harness/src/", "harness/docs/", ".github/", "scripts/slurm/", "Makefile"):
        paths = [path for path in here if path.startswith(folder) and not path.startswith(left_out)]
        assert paths
        assert [path for path in paths if there.get(path) != here[path]] == []
    assert not [path for path in there if path.startswith(("harness/tests", "harness/benchmarks"))]
    assert there[".gitattributes"] == b"harness/** linguist-vendored\n"
    assert (project / "harness" / "docs" / "strategies.png").read_bytes()[:4] == b"\x89PNG"


def test_nothing_of_the_template_is_left(project: Path) -> None:
    # The name of the package here may remain only as a word: [project], "the project", "of this
    # project", and a tracker's key, project: ${name}.
    the_word = re.compile(
        r"(?<!this )(?<!the )(?<!a )(?<!\[)(?<!_)\bproject(?!_cache|[a-z\']|: \$|\.optional)", re.I
    )
    for path, data in tracked(project).items():
        if not path.startswith("harness/"):
            text = " ".join(data.decode().split())
            assert [text[m.start() - 20 :][:60] for m in the_word.finditer(text)] == [], path


def test_project_has_the_answers_and_a_commit(project: Path) -> None:
    readme = (project / "README.md").read_text()
    assert readme.startswith('# striped-horses\n\nStripes, "measured"\n')
    assert "`src/zebra_study_2/`" in readme
    pyproject = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    assert pyproject["name"] == "striped-horses"
    assert pyproject["version"] == "0.1.0"
    assert pyproject["description"] == 'Stripes, "measured"'
    assert pyproject["authors"] == [{"name": "Zoë O'Hara"}]  # style: ignore
    assert "`src/zebra_study_2/`: models" in (project / "AGENTS.md").read_text()
    assert succeed(project, "git", "status", "--porcelain") == ""
    assert len(succeed(project, "git", "log", "--oneline").splitlines()) == 1


def test_links_and_named_files_exist_without_the_examples(skeleton: Path) -> None:
    for page in (skeleton / "START.md", *(skeleton / "harness").rglob("*.md")):
        links = re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    text = (skeleton / "README.md").read_text() + (skeleton / "START.md").read_text()
    named = [
        name for name in re.findall(r"`((?:conf|src|scripts)/[^`]+)`", text) if "mine" not in name
    ]
    assert len(named) > 3
    assert [name for name in named if not (skeleton / name).exists()] == []


def test_each_example_can_be_chosen_and_no_other_file_needs_it(
    project: Path, skeleton: Path, tmp_path: Path
) -> None:
    whole, without = tracked(project), tracked(skeleton)
    renamed = {
        path.replace("src/project/", "src/zebra_study_2/")
        for paths in FILES["examples"].values()
        for path in paths
    }
    assert renamed == whole.keys() - without.keys()
    assert {path: whole[path] for path in without} == without
    text = tracked(make(tmp_path / "text", "--examples=text"))
    assert "conf/data/text.yaml" in text
    assert "conf/data/images.yaml" not in text
    modules = [path.split("/", 2)[2][:-3] for path in renamed if path.startswith("src/")]
    imported = re.compile("|".join(name.replace("/", r"\.") for name in modules).encode())
    own = {p: d for p, d in without.items() if p.startswith(("src/", "conf/", "tests/"))}
    assert [path for path, data in own.items() if imported.search(data)] == []


def test_few_files_are_the_owner_s(project: Path, skeleton: Path) -> None:
    for made, most in ((project, 100), (skeleton, 65)):
        assert len([path for path in tracked(made) if not path.startswith("harness/")]) <= most


def test_of_the_package_kind_one_line_is_the_library(tmp_path: Path) -> None:
    address = "https://example.org/template.git"
    old = tracked(make(tmp_path / "old", f"--library={address}@v1"))
    new = tracked(make(tmp_path / "new", f"--library={address}@v2"))
    assert not [path for path in old if path.startswith("harness/")]
    dependencies = tomllib.loads(old["pyproject.toml"].decode())["project"]["dependencies"]
    assert dependencies == [f"lightning-harness @ git+{address}@v1#subdirectory=harness"]
    assert {path for path in old if old[path] != new[path]} == {"pyproject.toml", "START.md"}
    lines = zip(old["pyproject.toml"].splitlines(), new["pyproject.toml"].splitlines(), strict=True)
    assert len([pair for pair in lines if pair[0] != pair[1]]) == 1
    assert b"(https://example.org/template/blob/v1/harness/docs/data.md)" in old["START.md"]


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Also where no dependency is installed: -S."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "train.py").write_text("mine\n")
    for word, reason in {
        "--package=my-study": "no valid name for import",
        "--package=class": "no valid name for import",
        "--package=json": "is the name of a package",
        "--package=torch": "is the name of a package",
        "--package=harness": "is the name of a package",
        "--name=Torch": "is the name of a package",
        "--name=my study!": "no valid name for pip",
        "--examples=audio": "audio is no example",
        str(tmp_path / "full"): "is not empty",
    }.items():
        arguments = [tmp_path / "new", "--name=my-study", "--package=my_study", word]
        arguments = arguments if word.startswith("-") else [word, *arguments[1:3]]
        result = run(ROOT, "python", "-S", "template/make_project.py", *arguments)
        assert result.returncode == 1, word
        assert reason in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "full" / "train.py").read_text() == "mine\n"
