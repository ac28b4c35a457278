"""A resumed run shows what has changed, and refuses a checkpoint that does not fit the code."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness import Run, UserError, evaluate, provenance, train
from harness.command.run_folder import save_config
from tests.strategy_runs import write_conf

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's, of few workers
NAME = "study_of_history"
CODE = """
import torch
from torch import nn
from tests.training.foreign import WithLoaders


class Model(WithLoaders):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
"""
WORDS = (
    *("data=null", "callbacks.progress_bar=null", "callbacks.checkpoint=null", "logger=none"),
    *("trainer.max_epochs=2", "checkpoint.every_n_steps=1", "checkpoint.num_kept=100"),
    "objective=null",
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run of a researcher's own code, with 8 steps."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it knows files by second and size
    chosen = write_conf(tmp_path, model=f"_target_: {NAME}.Model\n")
    write(tmp_path, CODE)
    yield train(*chosen, *WORDS, f"output_dir={tmp_path}")
    sys.modules.pop(NAME, None)


def write(folder: Path, code: str) -> None:
    """Write the code, and forget what was imported, as a new process would."""
    (folder / f"{NAME}.py").write_text(code)
    sys.modules.pop(NAME, None)


def go_on(run: Run) -> str:
    """Resume a run from its third step, and return the new part of its log."""
    for path in (run.folder / "checkpoints").glob("step_*"):
        if int(path.stem.removeprefix("step_")) > 3:
            path.unlink()
    (run.folder / "results.json").unlink(missing_ok=True)
    (run.folder / "run.log").unlink(missing_ok=True)
    train(f"resume={run.folder}")
    return (run.folder / "run.log").read_text()


def test_other_packages_are_shown_once_and_what_a_start_computes_with_is_noted(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (start,) = provenance.read(run.folder)["starts"]
    assert start["packages"]["torch"] == metadata.version("torch")
    assert start["num_threads"] >= 1
    assert "changed" not in go_on(run)
    installed = provenance.packages() | {"Python": "3.99.0"}
    monkeypatch.setattr(provenance, "packages", lambda: installed)
    shown = f"these have changed: Python {platform.python_version()} -> 3.99.0"
    assert go_on(run).count(shown) == 1
    assert "changed" not in go_on(run)
    monkeypatch.undo()
    tested = evaluate(run.folder / "checkpoints" / "step_3.ckpt")
    assert "Python 3.99.0 -> " in (tested.folder / "run.log").read_text()


ONE = "        self.one = nn.Linear(5, 5)\n"
TWO = "        self.two = nn.Linear(5, 5)\n"
RATES = "[torch.optim.lr_scheduler.StepLR(optimizer, 1)]"
# The code, its replacement, and a part of the message.
MISFITS = (
    (ONE, f"        self.more = nn.Linear(1, 1)\n{ONE}", "more.weight"),
    (ONE + TWO, TWO + ONE, "two.weight would get the optimizer's state of one.weight"),
    ("Adam(", "SGD(", "its optimizers are Adam, and configure_optimizers returns SGD"),
    (RATES, f"{RATES} * 2", "schedules are StepLR, and configure_optimizers returns St"),
)


def test_checkpoint_that_does_not_fit_is_refused(run: Run, tmp_path: Path) -> None:
    for old, new, reason in MISFITS:
        write(tmp_path, CODE.replace(old, new))
        with pytest.raises(UserError) as refused:
            go_on(run)
        text = str(refused.value)
        assert len(text.splitlines()) == 2
        assert "step_3.ckpt does not fit what the code builds today: " in text
        assert reason in text
        assert "use resume=null to start another run" in text
    write(tmp_path, CODE)
    go_on(run)
    saved = OmegaConf.load(run.folder / "config.yaml")
    saved.pop("callbacks")
    save_config(saved, run.folder)
    with pytest.raises(UserError, match="The config has no callbacks: another version"):
        go_on(run)
