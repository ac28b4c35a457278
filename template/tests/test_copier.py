"""`copier copy` makes a project; `copier update` merges the template's changes into it."""

import re
from pathlib import Path

import pytest
import yaml

from template.tests.conftest import ANSWERS, ROOT, commit, run, succeed, tracked

OURS = ANSWERS["package"]
# Lines of an earlier version: in the library, in the user's files, and in lines that both change.
OLDER_LINES = {
    "harness/src/harness/errors.py": (b"class UserError", b"class Mistake"),
    "conf/trainer/default.yaml": (b"max_epochs: 20", b"max_epochs: 10"),
    "src/project/models/mlp.py": (b"A fully connected network.", b"A perceptron."),
    "conf/model/mlp.yaml": (b"hidden: [128, 64]", b"hidden: [32]"),
}
ADDED, GONE = "conf/strategy/gpu.yaml", "conf/trainer/gone.yaml"


def copier(folder: Path, *arguments: str | Path, **answers: str) -> str:
    """Run copier without questions."""
    data = [f"--data={key}={value}" for key, value in answers.items()]
    return succeed(folder, "python", "-m", "copier", *arguments, "--trust", "--defaults", *data)


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files below a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a repository with a tag, v2; v1 is an earlier state of it."""
    folder = tmp_path_factory.mktemp("template")
    succeed(folder, "git", "init", "-q", "-b", "main")
    now = tracked(ROOT)
    before = {path: data for path, data in now.items() if path != ADDED}
    before[GONE] = b"# Gone in version 2.\n"
    for path, (new, old) in OLDER_LINES.items():
        assert now[path].count(new) == 1
        before[path] = now[path].replace(new, old)
    write(folder, before)
    commit(folder, "Before")
    succeed(folder, "git", "tag", "v1.0.0")
    (folder / GONE).unlink()
    write(folder, now)
    commit(folder, "The working tree")
    succeed(folder, "git", "tag", "v2.0.0")
    return folder


def test_copier_writes_what_the_program_writes(
    template: Path, project: Path, tmp_path: Path
) -> None:
    copier(ROOT, "copy", template, tmp_path / "made", **ANSWERS)
    made = tracked(tmp_path / "made")
    assert b"_commit: v2.0.0" in made.pop(".copier-answers.yml")
    assert made == tracked(project)
    assert succeed(tmp_path / "made", "git", "status", "--porcelain") == ""


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.slow
def test_edits_survive_an_update_and_the_template_s_changes_arrive(
    template: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "zebra-study"
    # A relative path, which a later update could not follow if it were kept as it is.
    arguments = ("copy", "--vcs-ref=v1.0.0", template.name, folder)
    copier(template.parent, *arguments, **ANSWERS)
    assert (folder / GONE).exists()
    assert not (folder / ADDED).exists()
    mine = {
        f"src/{OURS}/models/mine.py": f"from {OURS}.models.mlp import MLP\n".encode(),
        "harness/benchmarks/mine.py": b"print('mine')\n",  # a folder that the template has as well
        "CHANGELOG.md": b"# Mine\n",
    }
    write(folder, mine)
    edit(folder / "conf/trainer/default.yaml", "log_every_n_steps: 10", "log_every_n_steps: 7")
    edit(folder / f"src/{OURS}/models/mlp.py", "nn.GELU()", "nn.ReLU()")
    edit(folder / "conf/model/mlp.yaml", "hidden: [32]", "hidden: [16]")
    edit(folder / "README.md", 'Stripes, "measured"', "Stripes of zebras, by us.")
    (folder / "conf" / "strategy" / "dp.yaml").unlink()
    commit(folder, "Mine")
    before = tracked(folder)

    copier(folder, "update")

    listed = succeed(folder, "git", "ls-files", "-co", "--exclude-standard").splitlines()
    after = {path: (folder / path).read_bytes() for path in listed if (folder / path).exists()}
    assert {path: after[path] for path in mine} == mine
    trainer = after["conf/trainer/default.yaml"].decode()
    assert "log_every_n_steps: 7" in trainer
    assert "max_epochs: 20" in trainer
    mlp = after[f"src/{OURS}/models/mlp.py"].decode()
    assert "nn.ReLU()" in mlp
    assert "A fully connected network." in mlp
    assert b"Stripes of zebras, by us." in after["README.md"]
    assert "conf/strategy/dp.yaml" not in after
    # If both have changed a line, git reports an ordinary conflict.
    sides = r"<<<<<<<.*hidden: \[16\].*=======.*hidden: \[128, 64\].*>>>>>>>"
    assert re.search(sides, after["conf/model/mlp.yaml"].decode(), re.S)
    changed = {path for path in before | after if before.get(path) != after.get(path)}
    expected = {path.replace("src/project", f"src/{OURS}") for path in OLDER_LINES}
    assert changed == expected | {ADDED, GONE, ".copier-answers.yml"}


@pytest.mark.slow
def test_a_package_is_updated_by_a_line_and_may_become_a_folder(
    template: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "zebra-study"
    copier(tmp_path, "copy", "--vcs-ref=v1.0.0", template, folder, **ANSWERS, harness="package")
    assert not (folder / "harness").exists()
    line = f'"lightning-harness @ git+file://localhost{template}@v1.0.0#subdirectory=harness",'
    assert line in (folder / "pyproject.toml").read_text()
    copier(folder, "update")
    assert line.replace("v1", "v2") in (folder / "pyproject.toml").read_text()
    commit(folder, "Version 2")

    for kind in ("vendored", "package"):
        copier(folder, "update", harness=kind)
        commit(folder, kind)
        assert (folder / "harness" / "src").exists() == (kind == "vendored")
        is_line = "lightning-harness @ git+" in (folder / "pyproject.toml").read_text()
        assert is_line == (kind == "package")
        answers = yaml.safe_load((folder / ".copier-answers.yml").read_text())
        assert answers["harness"] == kind


def test_an_answer_that_cannot_be_is_refused(template: Path, tmp_path: Path) -> None:
    arguments = ("copier", "copy", template, tmp_path / "new", "--trust", "--defaults")
    result = run(tmp_path, "python", "-m", *arguments, "--data=package=torch")
    assert result.returncode != 0
    assert "torch is the name of a package" in " ".join((result.stdout + result.stderr).split())
    assert not (tmp_path / "new" / "train.py").exists()
