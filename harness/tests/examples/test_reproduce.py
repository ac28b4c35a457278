"""A run is trained again by its own commit and diff; a message names each missing part."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from harness import UserError, provenance
from harness import reproduce as equality
from harness.reproduce import reproduce
from harness.runs import reading
from tests.conftest import LIBRARY, ROOT

pytestmark = pytest.mark.slow
GIT = ("git", "-c", "user.name=Ada", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
WORDS = ("experiment=table", "data.file=rows.csv", "data.target=y", "trainer.max_epochs=2")
WORDS += ("strategy=cpu", "trainer.enable_progress_bar=false", "name=dirty")


def run(project: Path, *words: object) -> subprocess.CompletedProcess[str]:
    path = f"{project / 'src'}:{LIBRARY / 'src'}"
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=project, capture_output=True, text=True,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of code that was not committed, in a repository whose code is another one since."""
    project = tmp_path_factory.mktemp("project")
    for name in ("src", "conf", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, project / name, ignore=ignored)
    for name in ("train.py", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    (project / ".gitignore").write_text("outputs/\n__pycache__/\n.cache/\n*.csv\n")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all")):
        subprocess.run([*GIT, *words], cwd=project, check=True)
    rows = np.random.default_rng(1).normal(size=(300, 4))
    np.savetxt(project / "rows.csv", rows, "%.6f", ",", header="a,b,c,y", comments="")
    (model,) = project.glob("src/*/models/table_mlp.py")
    (model.parent / "untracked.py").write_text("HERE = 1\n")
    package = f"{model.parents[1].name}.models.untracked"
    model.write_text(f"from {package} import HERE\n\n{model.read_text()}")
    result = run(project, "train.py", *WORDS)
    assert result.returncode == 0, result.stdout + result.stderr
    (model.parent / "untracked.py").unlink()
    model.write_text("raise RuntimeError('of today')")
    (project / "conf" / "train.yaml").write_text("no: [config")
    (run_dir,) = (project / "outputs" / "dirty").iterdir()
    return run_dir


def test_a_run_is_trained_again_by_its_own_code_whatever_there_is_today(trained: Path) -> None:
    project = trained.parents[2]
    result = run(project, project / "scripts" / "runs.py", "reproduce", trained)
    assert result.returncode == 0, result.stdout + result.stderr
    first, *_ = result.stdout.splitlines()
    (start,) = provenance.read(trained)["starts"]
    expected = (
        f"This command runs, with your permissions, the code of {start['commit'][:7]} by Ada, "
    )
    assert first.startswith(expected)
    assert first.endswith(f" and {start['diff']}.")
    assert "differs" not in result.stdout
    assert result.stdout.endswith("reproduced, bit-identical\n")
    (again,) = (trained / "reproduced").iterdir()
    assert [*again.glob("code/src/*/models/untracked.py")]
    assert len(reading.find([project / "outputs"]).frame) == 1  # it is no further run


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """The run in another folder, to be damaged."""
    ignored = shutil.ignore_patterns("reproduced")
    return Path(shutil.copytree(trained, tmp_path / "copy", symlinks=True, ignore=ignored))


def test_what_is_missing_is_told_and_nothing_is_made(copy: Path, tmp_path: Path) -> None:
    (start,) = provenance.read(copy)["starts"]
    for starts, line in (
        ([{**start, "commit": None}], "outside of a git repository, or with version"),
        ([{**start, "no_diff": "it is large"}], "changes were not saved: it is large."),
        ([{**start, "commit": "0" * 40}], "git log failed in "),
        ([{**start, "diff": None}, start], "its code changed while it was stopped, between its 2"),
    ):
        provenance.note(copy, starts=starts)
        with pytest.raises(UserError, match=line):
            reproduce(copy, tmp_path / "again")
    config = (copy / "config.yaml").read_text()
    provenance.note(copy, starts=[start])
    (copy / "config.yaml").write_text(config.replace("\nseed: 1\n", "\nseed: 2\n"))
    with pytest.raises(UserError, match="damaged or edited"):
        reproduce(copy, tmp_path / "again")
    (copy / "results.json").unlink()
    with pytest.raises(
        UserError, match=r"it is stopped\. Let it finish with: python train.py resume="
    ):
        reproduce(copy, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_difference_is_told_with_its_place(trained: Path, copy: Path) -> None:
    before = equality.results_of(trained)
    path = copy / "checkpoints" / "best.ckpt"
    saved = torch.load(path, weights_only=True)
    name = next(iter(saved["state_dict"]))
    saved["state_dict"][name].view(-1)[0] += 0.5
    path.unlink()  # a link to another one's
    torch.save(saved, path)
    table = (copy / "metrics.csv").read_text()
    (copy / "metrics.csv").write_text(table.replace("val/", "other/", 1))
    after = equality.results_of(copy)
    differ = {name for name in before | after if before.get(name) != after.get(name)}
    assert f"best.ckpt: {name}" in differ
    assert len([n for n in differ if n.startswith("metrics.csv: ")]) == 2
    assert len(differ) == 3
