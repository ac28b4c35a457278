"""A run says what of its code has changed where it goes on, is evaluated or predicted with."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from harness import Run, UserError, code_version, evaluate, load_run, predict, train
from harness.command.run_folder import save_config
from harness.run.code_history import history
from tests_harness.conftest import slow
from tests_harness.faults.fork_server import command
from tests_harness.faults.run_folder import contents, differences

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
from tests_harness.run.foreign import Tested, WithLoaders


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

    def edit(self, file: str, *changes: tuple[str, str]) -> None:
        """Change a file, and forget what was imported, as a new process would."""
        path = self.folder / PACKAGE / file
        text = path.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
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


ACTIVATION = ("torch.relu", "torch.tanh")
TOLD = f"has changed since step_3.ckpt was trained: {PACKAGE}/net.py."


def test_the_same_code_goes_on_without_a_word(study: Study, run: Run) -> None:
    study.edit("net.py", ("        return", "        # Why.\n        return"))
    assert "has changed" not in study.go_on(run)
    assert [start for start, _ in history(run.folder / "code")] == [0]


def test_other_code_of_the_same_shapes_goes_on_with_a_warning(study: Study, run: Run) -> None:
    study.edit("net.py", ACTIVATION)
    said = study.go_on(run)
    assert said.count(TOLD) == 1
    assert "code/step_0.zip" in said
    assert "WARNING" in said
    kept = code_version.load(run.folder / "code" / "step_0.zip")
    assert kept is not None
    assert kept.sources[f"{PACKAGE}/net.py"].decode() == NET


def test_a_change_is_told_once_and_not_forgotten(study: Study, run: Run) -> None:
    study.edit("net.py", ACTIVATION)
    assert TOLD in study.go_on(run)
    assert "has changed" not in study.go_on(run)  # killed before its next checkpoint
    assert [start for start, _ in history(run.folder / "code")] == [0, 3]
    assert "has changed" not in study.go_on(run, step=6)
    study.edit("net.py", ("torch.tanh", "torch.sin"))
    assert "step_3.zip" in study.go_on(run, step=6)  # what trained it is not the first code
    assert [start for start, _ in history(run.folder / "code")] == [0, 3, 6]


def test_going_back_to_the_code_that_trained_is_no_change(study: Study, run: Run) -> None:
    study.edit("net.py", ACTIVATION)
    study.go_on(run)
    study.edit("net.py", ACTIVATION[::-1])
    assert "has changed" not in study.go_on(run)  # step 3 was trained by the first
    assert [start for start, _ in history(run.folder / "code")] == [0]


def test_run_that_begins_anew_forgets_what_trained_nothing(study: Study, run: Run) -> None:
    for file in (*(run.folder / "checkpoints").iterdir(), run.folder / "results.json"):
        file.unlink()
    study.edit("net.py", ACTIVATION)
    train(f"resume={run.folder}")
    ((_, path),) = history(run.folder / "code")
    kept = code_version.load(path)
    assert kept is not None
    assert b"torch.tanh" in kept.sources[f"{PACKAGE}/net.py"]


def test_module_that_is_imported_later_counts(study: Study) -> None:
    (study.folder / PACKAGE / "late.py").write_text("RATE = 1\n")
    late = f"    def on_fit_start(self):\n        from {PACKAGE} import late\n\n    def conf"
    study.edit("model.py", ("    def conf", late))
    run = train(*study.words)
    kept = code_version.load(run.folder / "code" / "step_0.zip")
    assert kept is not None
    assert f"{PACKAGE}/late.py" in kept.sources
    study.edit("late.py", ("1", "2"))
    assert f"{PACKAGE}/late.py" in study.go_on(run)


def test_versions_are_told(study: Study, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = code_version.installed_versions
    newer = {"Python": "3.99.0", "torch": "2.99.1"}
    monkeypatch.setattr(
        code_version, "installed_versions", lambda packages: found(packages) | newer
    )
    said = study.go_on(run)
    assert f"torch {torch.__version__} -> 2.99.1" in said
    assert "-> 3.99.0" in said


def test_damaged_history_is_told(study: Study, run: Run) -> None:
    (run.folder / "code" / "step_0.zip").write_bytes(b"PK")
    assert "step_0.zip is damaged: whether the code has changed is not known" in study.go_on(run)


def test_run_of_an_older_version_goes_on_without_a_word(study: Study, run: Run) -> None:
    shutil.rmtree(run.folder / "code")
    study.edit("net.py", ACTIVATION)
    assert "has changed" not in study.go_on(run)
    assert [start for start, _ in history(run.folder / "code")] == [3]


def test_full_disk_costs_the_history_and_not_the_run(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(code_version, "write_durably", refuse)
    run = train(*study.words)
    assert "code was not kept: No space left on device." in (run.folder / "run.log").read_text()
    assert run.results


def test_evaluation_prediction_and_notebook_tell_the_same(
    study: Study, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = run.folder / "checkpoints" / "step_3.ckpt"
    study.edit("net.py", ACTIVATION)
    tested = evaluate(checkpoint, "callbacks={}")
    assert (tested.folder / "run.log").read_text().count(TOLD) == 1
    table = predict(checkpoint)
    assert (table.parent / "run.log").read_text().count(TOLD) == 1
    _ = load_run(run.folder).model
    study.edit("net.py", ACTIVATION[::-1])
    log = evaluate(checkpoint, "callbacks={}").folder / "run.log"
    assert not log.exists() or "has changed" not in log.read_text()


LAST, PARAMETERS = "        self.last = ", "self.net.parameters()"
ONE, TWO = (
    "        self.one = nn.Linear(5, width)\n",
    "        self.two = nn.Linear(width, 5)\n",
)
RATES = "[torch.optim.lr_scheduler.StepLR(optimizer, 1)]"
# The file, what changes in it, and what is told.
MISFITS = {
    "new layer": (
        "net.py",
        (LAST, f"        self.more = nn.Linear(1, 1)\n{LAST}"),
        "net.more.weight",
    ),
    "new buffer": (
        "net.py",
        (LAST, f"        self.register_buffer('b', torch.ones(1))\n{LAST}"),
        "net.b",
    ),
    "other shapes": (
        "net.py",
        ("Linear(5, 1)", "Linear(5, 2)"),
        "size mismatch for net.last.weight",
    ),
    "another order": (
        "net.py",
        (ONE + TWO, TWO + ONE),
        "net.one.weight would go to net.two.weight",
    ),
    "another optimizer": ("model.py", ("Adam(", "SGD("), "it has no momentum, dampening for SGD"),
    "another group": (
        "model.py",
        (PARAMETERS, f"[{{'params': [p]}} for p in {PARAMETERS}]"),
        "a different number of parameter groups",
    ),
    "fewer parameters": (
        "model.py",
        (PARAMETERS, "self.net.last.parameters()"),
        "doesn't match the size of optimizer's group",
    ),
    "two schedulers": (
        "model.py",
        (RATES, f"{RATES} * 2"),
        "it has 1 schedulers, and configure_optimizers gives 2",
    ),
    "no scheduler": (
        "model.py",
        (RATES, "[]"),
        "it has 1 schedulers, and configure_optimizers gives 0",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_checkpoint_that_does_not_fit_is_refused_with_what_has_changed(
    name: str, study: Study, run: Run
) -> None:
    file, change, reason = MISFITS[name]
    study.edit(file, change)
    with pytest.raises(UserError) as refused:
        study.go_on(run)
    text = str(refused.value)
    assert len(text.splitlines()) == 3
    assert "step_3.ckpt does not fit what the code builds today: " in text
    assert reason in text
    assert f"{PACKAGE}/{file}. What trained it is in" in text
    assert "use resume=null to start another run" in text
    study.edit(file, change[::-1])
    assert "has changed" not in study.go_on(run)


def test_averaged_weights_that_do_not_fit_are_refused(study: Study) -> None:
    ema = "+callbacks.ema._target_=pytorch_lightning.callbacks.EMAWeightAveraging"
    run = train(*study.words, ema)
    study.edit("net.py", MISFITS["new layer"][1])
    with pytest.raises(UserError, match=r"net\.more\.weight"):
        study.go_on(run)


def test_all_processes_refuse_and_one_tells(study: Study, run: Run) -> None:
    (run.folder / "results.json").unlink()
    study.edit("net.py", MISFITS["new layer"][1])
    words = ("train.py", f"resume={run.folder}", "strategy=ddp", "trainer.devices=2")
    path = f"{study.folder}:{os.environ.get('PYTHONPATH', '')}"
    on_cpu = ("trainer.accelerator=cpu", "trainer.max_epochs=3")
    result = command(*words, *on_cpu, environment={"PYTHONPATH": path})
    assert result.returncode == 1
    assert result.stderr.count("does not fit what the code builds today: ") == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.count("WARNING: The code has changed") == 1


OLDER = {
    "class": ("class Net", "class Network", "Net does not exist. Did you mean"),
    "argument": ("width", "hidden", "has no argument width"),
    "new argument": ("width=4", "width, depth", "missing 1 required positional argument"),
}


@pytest.mark.parametrize("name", OLDER)
def test_config_of_older_code_is_told_with_what_has_changed(
    name: str, study: Study, run: Run
) -> None:
    old, new, reason = OLDER[name]
    study.edit("net.py", (old, new))
    checkpoint = run.folder / "checkpoints" / "step_3.ckpt"
    for use in (
        lambda: evaluate(checkpoint, "callbacks={}"),
        lambda: predict(checkpoint),
        lambda: load_run(run.folder).model,
        lambda: study.go_on(run),
    ):
        study.forget()
        with pytest.raises(UserError) as refused:
            use()
        assert reason in str(refused.value)
        assert f" was trained: {PACKAGE}/net.py. What trained it is in" in str(refused.value)


def test_file_that_the_config_names_and_has_gone_is_told(study: Study, run: Run) -> None:
    (study.folder / PACKAGE / "net.py").rename(study.folder / PACKAGE / "network.py")
    study.forget()
    with pytest.raises(
        UserError, match=f"There is no module {PACKAGE}.net(.|\n)*net.py \\(gone\\)"
    ):
        study.go_on(run)


@pytest.mark.parametrize("key", ["checkpoint", "logger", "callbacks", "trainer.sync_batchnorm"])
def test_config_without_a_key_that_is_needed_today_is_refused(
    key: str, study: Study, run: Run
) -> None:
    saved = OmegaConf.load(run.folder / "config.yaml")
    parent, _, leaf = key.rpartition(".")
    (OmegaConf.select(saved, parent) if parent else saved).pop(leaf)
    save_config(saved, run.folder)
    with pytest.raises(UserError, match=f"The config has no {key}: another version"):
        study.go_on(run)


def test_rate_that_the_optimizers_state_overrules_is_told_once(study: Study, run: Run) -> None:
    """Lightning loads the rate of the checkpoint, whatever the code says now."""
    study.edit("model.py", ("lr=0.01", "lr=0.5"))
    said = study.go_on(run)
    assert "what it is built with now has no effect: lr=0.01 (now 0.5)" in said
    assert "use resume=null" in said
    assert "has no effect" not in study.go_on(run, 5)


OPTIMIZERS = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
OTHERS = sorted(OPTIMIZERS - {"AdamW", "LBFGS", "Optimizer", "SparseAdam", "Muon"})


@pytest.mark.parametrize("name", ["AdamW", "LBFGS", *slow(*OTHERS)])
def test_every_optimizer_of_torch_goes_on(name: str, study: Study) -> None:
    study.edit("model.py", ("optim.Adam(", f"optim.{name}("))
    run = train(*study.words)
    before = contents(run.folder)
    study.go_on(run)
    assert differences(before, contents(run.folder)) == []


def test_config_that_does_not_say_whether_to_test_does(study: Study, run: Run) -> None:
    saved = OmegaConf.load(run.folder / "config.yaml")
    saved.pop("test")
    save_config(saved, run.folder)
    study.go_on(run)
    assert "test_loss" in load_run(run.folder).results
