"""A resumed run shows what has changed, and refuses a checkpoint that does not fit the code."""

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness import Run, UserError, evaluate, load_run, record, train
from harness.command.run_folder import save_config

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of few workers
PACKAGE = "study_of_history"
NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.one = nn.Linear(5, width)
        self.two = nn.Linear(width, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x):
        return self.last(self.two(torch.relu(self.one(x))))
"""
MODULE = """
import torch
from tests.run.foreign import Tested, WithLoaders


class Model(WithLoaders):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
"""


@dataclass
class Study:
    """A researcher's own package, and a run of it with 8 steps."""

    folder: Path

    @property
    def words(self) -> list[str]:
        return [
            f"hydra.searchpath=[file://{self.folder}/conf]", "model=study", "data=null",
            "callbacks.progress_bar=null", "logger=none", "trainer.max_epochs=2", "objective=null",
            "checkpoint.every_n_steps=1", "checkpoint.num_kept=100", "callbacks.checkpoint=null",
            f"output_dir={self.folder}",
        ]  # fmt: skip

    def edit(self, file: str, change: tuple[str, str]) -> None:
        """Change a file, and forget what was imported, as a new process would."""
        path = self.folder / PACKAGE / file
        text = path.read_text()
        assert change[0] in text
        path.write_text(text.replace(*change))
        self.forget()

    def forget(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]

    def go_on(self, run: Run, step: int = 3) -> str:
        """Let a run go on from a step, and return what its log says meanwhile."""
        for path in (run.folder / "checkpoints").glob("step_*"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()
        (run.folder / "results.json").unlink(missing_ok=True)
        (run.folder / "run.log").unlink(missing_ok=True)
        train(f"resume={run.folder}")
        return (run.folder / "run.log").read_text()


def write(folder: Path) -> Study:
    (folder / PACKAGE).mkdir(parents=True)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / PACKAGE / "__init__.py").touch()
    (folder / PACKAGE / "net.py").write_text(NET)
    (folder / PACKAGE / "model.py").write_text(MODULE)
    config = f"_target_: {PACKAGE}.model.Model\nnet:\n  _target_: {PACKAGE}.net.Net\n  width: 4\n"
    (folder / "conf" / "model" / "study.yaml").write_text(config)
    return Study(folder)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it knows files by second and size
    made = write(tmp_path)
    yield made
    made.forget()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the package as it is written above."""
    made = write(tmp_path_factory.mktemp("study"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(made.folder)
        folder = train(*made.words).folder
    made.forget()
    return folder


@pytest.fixture
def run(finished: Path, study: Study) -> Run:
    """A copy of it."""
    folder = study.folder / "default" / "run"
    shutil.copytree(finished, folder, symlinks=True)
    return load_run(folder)


def test_other_packages_are_shown_once_and_what_a_start_computes_with_is_noted(
    study: Study, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = record.read(run.folder)
    (start,) = noted["starts"]
    assert start["packages"]["torch"] == metadata.version("torch")
    assert start["num_threads"] >= 1
    assert "changed" not in study.go_on(run)
    installed = record.packages() | {"Python": "3.99.0"}
    monkeypatch.setattr(record, "packages", lambda: installed)
    shown = f"Since the run was trained Python {platform.python_version()} -> 3.99.0"
    assert study.go_on(run).count(shown) == 1
    assert "changed" not in study.go_on(run)
    monkeypatch.undo()
    tested = evaluate(run.folder / "checkpoints" / "step_3.ckpt")
    assert "Python 3.99.0 -> " in (tested.folder / "run.log").read_text()


ONE = "        self.one = nn.Linear(5, width)\n"
TWO = "        self.two = nn.Linear(width, 5)\n"
RATES = "[torch.optim.lr_scheduler.StepLR(optimizer, 1)]"
# The file, what stands in it and what is written instead, and what is shown.
MISFITS = (
    ("net.py", ONE, f"        self.more = nn.Linear(1, 1)\n{ONE}", "net.more.weight"),
    ("net.py", ONE + TWO, TWO + ONE, "state of net.one.weight would go to net.two.weight"),
    ("model.py", "Adam(", "SGD(", "its optimizers are Adam, and configure_optimizers gives SGD"),
    ("model.py", RATES, f"{RATES} * 2", "schedules are StepLR, and configure_optimizers gives St"),
)


def test_checkpoint_that_does_not_fit_is_refused(study: Study, run: Run) -> None:
    for file, old, new, reason in MISFITS:
        study.edit(file, (old, new))
        with pytest.raises(UserError) as refused:
            study.go_on(run)
        text = str(refused.value)
        assert len(text.splitlines()) == 2
        assert "step_3.ckpt does not fit what the code builds today: " in text
        assert reason in text
        assert "use resume=null to start another run" in text
        study.edit(file, (new, old))
    study.go_on(run)


def test_config_without_a_key_is_refused(study: Study, run: Run) -> None:
    saved = OmegaConf.load(run.folder / "config.yaml")
    saved.pop("callbacks")
    save_config(saved, run.folder)
    with pytest.raises(UserError, match="The config has no callbacks: another version"):
        study.go_on(run)
