"""A mistake in the user's code gets one to three lines, with the place in their file first."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import DictConfig, OmegaConf

from harness.errors import UserError
from harness.parity.seeded_steps import SeededSteps
from harness.training import train as run
from harness.training import user_errors
from tests.faults.fork_server import command
from tests.strategy_runs import write_conf

# A module and its data, as a user writes them; each mistake is a change of this text.
RIGHT = """
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from harness.data.datamodule import DataModule


class Numbers(Dataset):
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((6,), float(index)), index % 4


class Data(DataModule):
    def __init__(self, **settings):
        super().__init__(batch_size=8, **settings)

    def make_dataset(self, split):
        return Numbers(split)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        return self.linear(x)


class Model(pl.LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = net or Net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


class Mistake(NamedTuple):
    """A change of RIGHT, and what is shown."""

    old: str
    new: str
    function: str  # of the line to blame; empty for none
    says: str
    blamed: str = "#!"  # text of the line to blame


STEP = "        loss = F.cross_entropy(self(x), y)\n"
RETURN = "        return loss\n"
BATCH = "        x, y = batch\n        loss"
SAMPLE = "        return torch.full((6,), float(index)), index % 4\n"
LAYER = "        self.linear = nn.Linear(6, 4)\n"
OPTIMIZER = "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
SHAPES = Mistake(
    *(LAYER, "        self.linear = nn.Linear(5, 4)\n", "forward"),
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x6 and 5x4)\n",
    blamed="return self.linear(x)",
)
COLUMN = Mistake(
    SAMPLE, '        return {"x": 1.0}["y"], 2  #!\n', "__getitem__", "KeyError: 'y'\n"
)
LABEL = Mistake(
    *("index % 4\n", "index % 5\n", "training_step"),
    "IndexError: Target 4 is out of bounds.\nA label must be smaller than the network's number of "
    "outputs, and not negative.\n",
    blamed=STEP,
)
IN_INIT = Mistake(
    *(LAYER, '        self.linear = nn.Linear(6, int("4 wide"))  #!\n', "__init__"),
    "ValueError: invalid literal for int() with base 10: '4 wide'\n"
    "The error occurred while model was built.",
)
IN_TRAINING = [
    *(SHAPES, LABEL, COLUMN),
    Mistake(BATCH, BATCH.replace(" = batch", ", z = batch  #!"), "training_step",
            "ValueError: not enough values to unpack (expected 3, got 2)\n"),
    # As torch says it on a GPU.
    Mistake(STEP, '        raise RuntimeError("CUDA out of memory. Tried to allocate 2 MiB")  #!\n',
            "training_step", "out of memory\ndata.max_samples_per_device="),
    # No line of these is at fault.
    Mistake(RETURN, "        return loss.detach()\n", "", "without detach"),
    Mistake(RETURN, "        return loss * torch.ones(8)\n", "", "must be one number: take"),
    Mistake(OPTIMIZER, OPTIMIZER.replace("return ", ""), "", "Return the optimizer"),
    Mistake(SAMPLE, "        return torch.zeros(6 + index), 1\n", "", "pad or crop them"),
    Mistake("def training_step(", "def train_step(", "", "No `training_step()` method defined"),
]  # fmt: skip
FIFTH = Mistake(
    STEP,
    f"{STEP}        if self.global_step == 4:\n            raise OSError('the fifth step')  #!\n",
    *("training_step", "OSError: the fifth step"),
)
# They are found when the run is built, which leaves no folder.
AT_BUILD = [
    IN_INIT,
    Mistake("(nn.Module):\n", "(nn.Module)  #!\n", "<module>", "SyntaxError: expected ':'"),
    Mistake("import torch\n", "import a_package  #!\n", "<module>", "No module named 'a_package'"),
]


@pytest.fixture
def owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write what a user wrote, each time into another folder; it is imported as ``mine``."""

    def write(mistake: Mistake | None = None) -> Path:
        text = RIGHT
        if mistake is not None:
            assert RIGHT.count(mistake.old) == 1
            text = RIGHT.replace(mistake.old, mistake.new)
        path = tmp_path / f"mine_{len(list(tmp_path.glob('mine_*')))}" / "mine.py"
        path.parent.mkdir()
        path.write_text(text)
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        return path

    return write


@pytest.fixture
def mine(make_cfg: Callable[..., DictConfig]) -> DictConfig:
    """The config of a run of what a user wrote."""
    cfg = make_cfg("data=synthetic", "watch=none", "logger=none", "strategy=cpu")
    cfg.trainer.max_epochs, cfg.trainer.enable_progress_bar, cfg.checkpoint = 1, False, None
    cfg.data, cfg.model = {"_target_": "mine.Data"}, {"_target_": "mine.Model"}
    cfg.callbacks = {}
    OmegaConf.set_struct(cfg, False)
    return cfg


def train(mine: DictConfig, **settings: object) -> str:
    """Train as a command does, and return what it would show of an exception."""
    cfg = copy.deepcopy(mine)
    for key, value in settings.items():
        cfg.merge_with({key: value})
    try:
        run.train(cfg)
    except UserError as error:
        return str(error)
    except Exception as error:
        message = user_errors.describe_user_error(error)
        if message is None:
            raise
        return message
    return "no mistake was found"


def expect(message: str, mistake: Mistake, path: Path) -> None:
    if mistake.function:
        lines = path.read_text().splitlines()
        (number,) = [i for i, line in enumerate(lines, 1) if mistake.blamed.strip() in line]
        where = "" if mistake.function == "<module>" else f" in {mistake.function}"
        assert message.startswith(f"{path}:{number}{where}: "), message
    assert mistake.says in message, message
    assert len(message.splitlines()) <= 3, message


def test_mistakes_get_their_place_and_a_traceback_in_the_log_and_right_code_trains(
    owners: Callable[..., Path], mine: DictConfig, tmp_path: Path
) -> None:
    log = tmp_path / "run" / "run.log"
    for mistake in [*AT_BUILD, *IN_TRAINING]:
        path = owners(mistake)
        message = train(mine)
        expect(message, mistake, path)
        if mistake in AT_BUILD:
            has_cure = "Add a_package to requirements.txt" in message  # which needs no traceback
            assert has_cure or "HYDRA_FULL_ERROR=1 prints the traceback." in message
        elif mistake.function:
            assert f"The traceback is in {log} (HYDRA_FULL_ERROR=1 prints it)." in message
            assert "Traceback (most recent call last)" in log.read_text()
            log.unlink()
    owners()
    assert train(mine) == "no mistake was found"


def test_error_of_a_public_package_names_its_line_and_its_traceback_is_in_the_log(
    owners: Callable[..., Path], mine: DictConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package raises itself, calls torch which raises, or is called in a data worker."""
    log = tmp_path / "run" / "run.log"
    for mistake, settings in (
        *((FIFTH, {"trainer": {"max_epochs": 2}}), (SHAPES, {})),
        (COLUMN, {"data": {"num_workers": 1}}),
    ):  # fmt: skip
        home = tmp_path / mistake.function / "site-packages"
        home.mkdir(parents=True)
        owners(mistake).rename(home / "mine.py")
        monkeypatch.syspath_prepend(home)
        message = train(mine, **settings)
        assert re.match(rf"mine\.py:\d+ in {mistake.function}: ", message), message
        assert mistake.says in message
        assert len(message.splitlines()) <= 3
        assert "Traceback (most recent call last)" in log.read_text()
        log.unlink()


def test_mistake_in_a_data_worker_or_a_replica_gets_its_place(
    owners: Callable[..., Path], mine: DictConfig
) -> None:
    """A worker's exception comes to the run's process as a text."""
    in_worker = "KeyError: 'y'\nData worker 0 raised it. Use data.num_workers=0 to debug it."
    path = owners(COLUMN)
    expect(train(mine, data={"num_workers": 1}), COLUMN._replace(says=in_worker), path)
    path = owners(SHAPES)
    dp = {"_target_": "harness.strategies.dp.DataParallelStrategy"}
    message = train(mine, trainer={"strategy": dp, "devices": 2})
    expect(message, SHAPES._replace(says="(4x6 and 5x4)\n"), path)


def test_settings_that_cannot_be_built_are_named_by_their_key(
    owners: Callable[..., Path], mine: DictConfig
) -> None:
    owners()
    finder = {"x": {"_target_": "pytorch_lightning.callbacks.LearningRateFinder"}}
    for settings, says in (
        ({"callbacks": finder}, r"callbacks: .*Finder trains first and .*\n.*Tuner in a notebook"),
        ({"model": {"_target_": "mine.Net"}}, "model: mine.Net is not a LightningModule. Pass"),
        ({"model": {"net": {"_target_": "torch.nn.Linear", "in_features": 3}}}, "model.net: Type"),
        ({"data": {"_target_": "harness.data.datamodule.DataModule", "batch_size": 8}}, ".*return"),
    ):  # fmt: skip
        message = train(mine, **settings)
        assert re.match(says, message), message
        assert len(message.splitlines()) <= 3


def test_bug_of_the_harness_keeps_its_traceback(
    owners: Callable[..., Path], mine: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners()
    names: dict[str, Callable[..., None]] = {}
    source = "def fail(self, *_):\n    raise KeyError('ours')\n"
    exec(compile(source, str(sys.modules[SeededSteps.__module__].__file__), "exec"), names)
    monkeypatch.setattr(SeededSteps, "on_train_start", names["fail"])
    with pytest.raises(KeyError, match="ours"):
        train(mine)


def test_run_that_was_refused_leaves_nothing_and_one_that_failed_goes_on(
    owners: Callable[..., Path], tmp_path: Path
) -> None:
    def run_mine(path: Path) -> subprocess.CompletedProcess[str]:
        conf = write_conf(path.parent, model="_target_: mine.Model", data="_target_: mine.Data")
        words = ["trainer.max_epochs=2", "checkpoint.every_n_steps=1", "resume=auto"]
        words += ["watch=none", "logger=none", "strategy=cpu", f"output_dir={tmp_path / 'out'}"]
        environment = {"PYTHONPATH": f"{path.parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
        return command("train.py", *conf, *words, environment=environment)

    for mistake in (IN_INIT, FIFTH):
        assert not list(tmp_path.glob("out/**/*.yaml"))
        path = owners(mistake)
        result = run_mine(path)
        assert result.returncode == 1
        expect(result.stderr, mistake, path)
    (run_dir,) = (tmp_path / "out" / "default").iterdir()
    assert "in training_step\n" in (run_dir / "run.log").read_text()
    result = run_mine(owners())
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "out" / "default").iterdir()) == [run_dir]
    assert (run_dir / "results.json").exists()
