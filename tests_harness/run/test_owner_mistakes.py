"""A mistake in the owner's code gets one to three lines, with the place in their file first."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import DictConfig

from harness.errors import UserError
from harness.run import mistakes, tasks

# A module and its data, as an owner writes them; each mistake is a change of this text.
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
    def __init__(self, batch_size=8, **settings):
        super().__init__(batch_size=batch_size, **settings)

    def make_dataset(self, split):
        return Numbers(split)


class Watcher(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen = batch_idx


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(6, width)

    def forward(self, x):
        return self.linear(x)


class Model(pl.LightningModule):
    def __init__(self, net=None, optimizer=None, scheduler=None):
        super().__init__()
        self.net = net or Net()
        self.make_optimizer = optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test/loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        if self.make_optimizer is not None:
            return self.make_optimizer(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@dataclass
class Mistake:
    """A change of RIGHT, the line that is blamed (with ``#!``, else that of ``blamed``), and what
    is said."""

    old: str
    new: str
    function: str
    says: str
    blamed: str = "#!"


STEP = "        loss = F.cross_entropy(self(x), y)\n"
SAMPLE = "        return torch.full((6,), float(index)), index % 4\n"
LABEL = "index % 4\n"
OPTIMIZER = "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
# They are found by the Trainer, and their run has a folder with a log.
IN_TRAINING = {
    "first batch does not fit": Mistake(
        "        self.linear = nn.Linear(6, width)\n",
        "        self.linear = nn.Linear(5, width)\n",
        "forward",
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x6 and 5x4)\n"
        "The batch: tensor (8, 6) float32, tensor (8,) int64 from 0 to 3.\n",
        blamed="return self.linear(x)",
    ),
    "label out of range": Mistake(
        LABEL,
        "index % 5\n",
        "training_step",
        "IndexError: Target 4 is out of bounds.\n"
        "The network knows 4 classes. The batch: tensor (8, 6) float32, tensor (8,) int64 from 0 "
        "to 4.\n",
        blamed=STEP,
    ),
    "labels of another kind": Mistake(
        STEP,
        "        loss = F.cross_entropy(self(x), y.int())  #!\n",
        "training_step",
        "RuntimeError: expected scalar type Long but found Int\nThe batch: tensor (8, 6)",
    ),
    "unpacks what the batch is not": Mistake(
        "        x, y = batch\n        loss",
        "        x, y, z = batch  #!\n        loss",
        "training_step",
        "ValueError: not enough values to unpack (expected 3, got 2)\nThe batch: tensor (8, 6)",
    ),
    "misspelt name": Mistake(
        STEP,
        "        loss = F.cross_entropi(self(x), y)  #!\n",
        "training_step",
        "AttributeError: module 'torch.nn.functional' has no attribute 'cross_entropi'",
    ),
    "dict without the loss": Mistake(
        "        return loss\n",
        '        return {"los": loss}\n',
        "training_step",
        "the 'loss' key needs to be present",
        blamed="def training_step",
    ),
    "loss of another type": Mistake(
        "        return loss\n",
        "        return loss, 3\n",
        "training_step",
        "`training_step` must return a Tensor, a dict, or None",
        blamed="def training_step",
    ),
    "loss that no gradient reaches": Mistake(
        "        return loss\n",
        "        return loss.detach()\n",
        "training_step",
        "without detach",
        blamed="def training_step",
    ),
    "loss of every sample": Mistake(
        "        return loss\n",
        "        return loss * torch.ones(8)\n",
        "training_step",
        "take its mean",
        blamed="def training_step",
    ),
    "logs a vector": Mistake(
        '        self.log("train/loss", loss)\n',
        '        self.log("train/loss", self(x))  #!\n',
        "training_step",
        "ValueError",
    ),
    "no optimizer is returned": Mistake(
        OPTIMIZER,
        "        torch.optim.SGD(self.parameters(), lr=0.1)\n",
        "configure_optimizers",
        "Return the optimizer",
        blamed="def configure_optimizers",
    ),
    "something else than an optimizer": Mistake(
        OPTIMIZER,
        "        return torch.optim.SGD\n",
        "configure_optimizers",
        "Unknown configuration for model optimizers",
        blamed="def configure_optimizers",
    ),
    "no training_step": Mistake(
        "    def training_step(",
        "    def train_step(",
        "Model",
        "No `training_step()` method defined",
        blamed="class Model",
    ),
    "no forward": Mistake(
        "    def forward(self, x):\n        return self.linear(x)\n",
        "",
        "forward",
        'Module [Net] is missing the required "forward" function',
        blamed="return self.net(x)",
    ),
    "missing file": Mistake(
        "        self.split = split\n",
        '        self.rows = open("not_there.csv").read()  #!\n',
        "__init__",
        "FileNotFoundError: [Errno 2] No such file or directory: 'not_there.csv'",
    ),
    "missing column": Mistake(
        SAMPLE,
        '        return {"x": 1.0}["y"], 2  #!\n',
        "__getitem__",
        "KeyError: 'y'\nSample 1",
    ),
    "samples of several lengths": Mistake(
        SAMPLE,
        "        return torch.zeros(6 + index), index % 4\n",
        "__getitem__",
        "pad or crop them",
        blamed="def __getitem__",
    ),
    "sample that is nothing": Mistake(
        SAMPLE,
        "        torch.zeros(6), index % 4\n",
        "__getitem__",
        "A sample must be made of tensors or numbers.",
        blamed="def __getitem__",
    ),
    "in a callback": Mistake(
        "        self.seen = batch_idx\n",
        "        self.seen += batch_idx  #!\n",
        "on_train_batch_end",
        "AttributeError: 'Watcher' object has no attribute 'seen'",
    ),
    "in validation": Mistake(
        '        self.log("val/loss", F.cross_entropy(self(x), y))\n',
        '        self.log("val/loss", F.cross_entropy(self(x), y[1:]))  #!\n',
        "validation_step",
        "Expected input batch_size (8) to match target batch_size (7)",
    ),
    "in the test": Mistake(
        '        self.log("test/loss", F.cross_entropy(self(x), y))\n',
        '        self.log("test/loss", F.cross_entropy(x, y, y))  #!\n',
        "test_step",
        "The batch: tensor (8, 6) float32",
    ),
    "a loader is not one": Mistake(
        "    def make_dataset(self, split):\n",
        "    def val_dataloader(self):\n        return 3\n\n    def make_dataset(self, split):\n",
        "val_dataloader",
        "An invalid dataloader was returned from `Data.val_dataloader()`",
        blamed="def val_dataloader",
    ),
}
# They are found when the run is built, which leaves no folder.
AT_BUILD = {
    "exception in __init__": Mistake(
        "        self.linear = nn.Linear(6, width)\n",
        '        self.linear = nn.Linear(6, int("4 wide"))  #!\n',
        "__init__",
        "ValueError: invalid literal for int() with base 10: '4 wide'\nIt was built for model.",
    ),
    "forgotten super().__init__": Mistake(
        "        super().__init__()\n        self.linear",
        "        self.linear",
        "__init__",
        "AttributeError: cannot assign module before Module.__init__() call",
        blamed="self.linear = ",
    ),
    "syntax": Mistake(
        "class Net(nn.Module):\n",
        "class Net(nn.Module)  #!\n",
        "",
        "SyntaxError: expected ':'",
    ),
    "package that is missing": Mistake(
        "import torch\n",
        "import torch\nimport a_package_that_is_missing  #!\n",
        "",
        "ModuleNotFoundError: No module named 'a_package_that_is_missing'",
    ),
    "name at the top of the file": Mistake(
        "class Net(nn.Module):\n", "WIDTH = wide  #!\n\n\nclass Net(nn.Module):\n", "", "NameError"
    ),
}


@pytest.fixture
def owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write what an owner wrote; it is imported as ``mine``."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def write(mistake: Mistake | None = None) -> Path:
        text = RIGHT
        if mistake is not None:
            assert RIGHT.count(mistake.old) == 1
            text = RIGHT.replace(mistake.old, mistake.new)
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write


def line_of(text: str, path: Path) -> int:
    lines = [i for i, line in enumerate(path.read_text().splitlines(), 1) if text.strip() in line]
    assert len(lines) == 1, lines
    return lines[0]


def train(make_cfg: Callable[..., DictConfig], **settings: object) -> str:
    """Train as a command does, and return what it would tell of an exception."""
    cfg = make_cfg("data=synthetic", "callbacks=none", "logger=none", "strategy=cpu")
    cfg.trainer.max_epochs, cfg.trainer.enable_progress_bar, cfg.checkpoint = 1, False, None
    cfg.data, cfg.model = {"_target_": "mine.Data"}, {"_target_": "mine.Model"}
    cfg.callbacks = {"watcher": {"_target_": "mine.Watcher"}}
    for key, value in settings.items():
        cfg.merge_with({key: value})
    try:
        tasks.train(cfg)
    except UserError as error:
        return str(error)
    except Exception as error:
        message = mistakes.of_owner(error)
        if message is None:
            raise
        return message
    return "no mistake was found"


def expect(message: str, mistake: Mistake, path: Path) -> None:
    place = f"{path}:{line_of(mistake.blamed, path)}"
    where = f"{place} in {mistake.function}: " if mistake.function else f"{place}: "
    assert message.startswith(where), message
    assert mistake.says in message, message
    assert len(message.splitlines()) <= 3, message


@pytest.mark.parametrize("name", IN_TRAINING)
def test_mistake_gets_its_place(
    name: str, owners: Callable[..., Path], make_cfg: Callable[..., DictConfig], tmp_path: Path
) -> None:
    path = owners(IN_TRAINING[name])
    message = train(make_cfg)
    expect(message, IN_TRAINING[name], path)
    log = tmp_path / "run" / "run.log"
    assert f"The traceback is in {log} (HYDRA_FULL_ERROR=1 prints it)." in message
    assert "Traceback (most recent call last)" in log.read_text()


@pytest.mark.parametrize("name", AT_BUILD)
def test_mistake_at_build_gets_its_place(
    name: str, owners: Callable[..., Path], make_cfg: Callable[..., DictConfig]
) -> None:
    path = owners(AT_BUILD[name])
    message = train(make_cfg)
    expect(message, AT_BUILD[name], path)
    assert "HYDRA_FULL_ERROR=1 prints the traceback." in message


def test_right_code_trains(
    owners: Callable[..., Path], make_cfg: Callable[..., DictConfig]
) -> None:
    """Else the changes would prove nothing."""
    owners()
    assert train(make_cfg) == "no mistake was found"
