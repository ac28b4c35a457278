"""`copier copy` makes a project that is somebody's own; `copier update` keeps it up to date."""

import re
from pathlib import Path

import pytest

from template import make_project
from template.make_project import PACKAGE, Files, read
from template.tests.conftest import ANSWERS, ROOT, commit, run, succeed

pytestmark = pytest.mark.slow

OURS = ANSWERS["package"]
# What an earlier version could have said: of the harness, of the owner's room, of both.
OLDER_LINES = [
    ("harness/src/harness/errors.py", b"class UserError", b"class Mistake"),
    ("conf/trainer/default.yaml", b"max_epochs: 20", b"max_epochs: 10"),
    (f"src/{PACKAGE}/models/mlp.py", b"A fully connected network.", b"A perceptron."),
    ("conf/model/mlp.yaml", b"hidden: [128, 64]", b"hidden: [32]"),
]
ADDED, GONE = "conf/strategy/ddp_spawn.yaml", "conf/debug/gone.yaml"


def copier(folder: Path, *arguments: str | Path, **answers: str) -> str:
    """Run copier without questions."""
    data = [f"--data={key}={value}" for key, value in answers.items()]
    return succeed(folder, "python", "-m", "copier", *arguments, "--trust", "--defaults", *data)


def older(now: Files) -> Files:
    """An earlier version: a file less, a file more, some lines changed."""
    before = dict(now)
    del before[ADDED]
    before[GONE] = make_project.File(b"# @package _global_\n# Gone in version 2.\n")
    for path, new, old in OLDER_LINES:
        assert now[path].data.count(new) == 1
        before[path] = now[path]._replace(data=now[path].data.replace(new, old))
    return before


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a repository with a tag, v2; v1 is an older state of it."""
    folder = tmp_path_factory.mktemp("template")
    succeed(folder, "git", "init", "-q", "-b", "main")
    now = read(ROOT)
    make_project.write(folder, older(now))
    commit(folder, "Before")
    succeed(folder, "git", "tag", "v1.0.0")
    (folder / GONE).unlink()
    make_project.write(folder, now)
    commit(folder, "The working tree")
    succeed(folder, "git", "tag", "v2.0.0")
    return folder


def test_copier_writes_what_the_program_writes(
    template: Path, project: Path, tmp_path: Path
) -> None:
    copier(ROOT, "copy", template, tmp_path / "made", **ANSWERS)
    made = read(tmp_path / "made")
    assert b"_commit: v2.0.0" in made.pop(".copier-answers.yml").data
    assert made == read(project)
    assert succeed(tmp_path / "made", "git", "status", "--porcelain") == ""


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_edits_survive_an_update_and_the_template_s_changes_arrive(
    template: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "zebra-study"
    copier(tmp_path, "copy", "--vcs-ref=v1.0.0", template, folder, **ANSWERS)
    assert (folder / GONE).exists()
    assert not (folder / ADDED).exists()
    mine = {
        f"src/{OURS}/models/mine.py": f"from {OURS}.models.mlp import MLP\n",
        "harness/benchmarks/mine.py": "print('mine')\n",  # a folder that the template has as well
        "CHANGELOG.md": "# Mine\n",
        "docs/digits.md": f"# Digits\n\nThe {PACKAGE}.models of another {PACKAGE}. copier\n",
    }
    for path, text in mine.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    edit(folder / "conf/trainer/default.yaml", "log_every_n_steps: 10", "log_every_n_steps: 7")
    edit(folder / f"src/{OURS}/models/mlp.py", "nn.GELU()", "nn.ReLU()")
    edit(folder / "conf/model/mlp.yaml", "hidden: [32]", "hidden: [16]")
    edit(folder / "README.md", 'Stripes, "measured"', "Stripes of zebras, by us.")
    (folder / "conf" / "strategy" / "dp.yaml").unlink()
    commit(folder, "Mine")
    before = read(folder)

    copier(folder, "update")

    after = read(folder)
    assert {path: after[path] for path in mine} == {path: before[path] for path in mine}
    harness = "harness/src/"  # not edited, so all of it is the template's
    theirs = {path: file for path, file in read(template).items() if path.startswith(harness)}
    assert {path: file for path, file in after.items() if path.startswith(harness)} == theirs
    trainer = (folder / "conf/trainer/default.yaml").read_text()
    assert "log_every_n_steps: 7" in trainer
    assert "max_epochs: 20" in trainer
    mlp = (folder / f"src/{OURS}/models/mlp.py").read_text()
    assert "nn.ReLU()" in mlp
    assert "A fully connected network." in mlp
    assert "Stripes of zebras, by us." in (folder / "README.md").read_text()
    assert (folder / ADDED).exists()
    assert not (folder / GONE).exists()
    assert not (folder / "conf" / "strategy" / "dp.yaml").exists()
    # Where both changed a line, git's ordinary conflict.
    conflict = (folder / "conf/model/mlp.yaml").read_text()
    sides = r"<<<<<<<.*hidden: \[16\].*=======.*hidden: \[128, 64\].*>>>>>>>"
    assert re.search(sides, conflict, re.S)
    unmerged = succeed(folder, "git", "diff", "--name-only", "--diff-filter=U")
    assert unmerged.split() == ["conf/model/mlp.yaml"]
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    expected = {path.replace(f"src/{PACKAGE}", f"src/{OURS}") for path, _, _ in OLDER_LINES}
    assert changed == expected | {ADDED, GONE, ".copier-answers.yml"}


def test_answers_that_cannot_be_are_refused(template: Path, tmp_path: Path) -> None:
    words = ("copier", "copy", template, tmp_path / "new", "--trust", "--defaults")
    for package, reason in (("torch", "torch is a dependency"), ("my-study", "such as my_study")):
        result = run(tmp_path, "python", "-m", *words, f"--data=package={package}")
        assert result.returncode != 0
        assert reason in " ".join((result.stdout + result.stderr).split())
        assert not (tmp_path / "new" / "train.py").exists()
