"""Runs the cells of the table: commands as a user types them, with YAML files and nothing else.

The names are those of ``conf/experiment``. README.md says what the columns are, and why cells are
as they are.
"""

import json
import os
import signal
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness.testing import command
from tests.conftest import ROOT
from tests.strategy_runs import distances
from tests.verdicts.table import read

COLUMNS = ["train", "ddp", "dp", "resume", "evaluate", "predict", "convert", "weights_only"]
# The package's on_save_checkpoint returns objects, which a run restores if it is trusted.
TRUSTED = {"resume": ("checkpoint.trusted=true",)}
# Further overrides of a column's command.
PACKAGES: dict[str, dict[str, tuple[str, ...]]] = {
    "boring": {},
    "image_classifier": {},
    # A backward pass reaches the parameters of one network only.
    "gan": {"ddp": ("++trainer.strategy.find_unused_parameters=true",)},
    "transformer": {},
    "chemprop": {},
    "nbeats": TRUSTED,
    "tft": TRUSTED,
    "deepar": {},
    "nequip": {},
    "rl4co": {"convert": ("--prefix", "")},  # a layer of it is called `module`
    "deeptab": {},
    "transformers": {},
    "peft": {},
}
# Names that conf/rules.yaml must allow in a project that uses them; a method by its full name.
NAMED = (
    "chemprop,deeptab,gluonts,nequip,pytorch_forecasting,rl4co,"
    "pytorch_forecasting.NBeats.from_dataset,"
    "pytorch_forecasting.TemporalFusionTransformer.from_dataset"
)
BOUNDS = {"ddp": 1e-5, "dp": 1e-5, "resume": 0.0}  # of a weight's difference, in single precision
TRACEBACK = "Traceback (most recent call last)"
Ended = subprocess.CompletedProcess[str]


class Cells:
    """The cells of one public module; a command that several of them need runs once.

    Args:
        name: of its experiment.
        folder: for its data and its runs, and in which the commands run.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.words = name, folder, PACKAGES[name]

    def check(self, column: str) -> None:
        """Fail unless a cell is what the table says."""
        expected = read()["public", self.name, column]
        ended = self.run(column)
        said = ended.stdout + ended.stderr
        assert expected.says in said, said[-3000:]
        if expected.verdict == "refused":
            assert ended.returncode > 0, said[-1000:]
            assert TRACEBACK not in said, said[-3000:]
            return
        assert ended.returncode == 0, said[-3000:]
        if expected.verdict == "equal" and column in BOUNDS:
            assert self.run("train").returncode == 0, self.run("train").stderr
            far = distances(self.weights("train"), self.weights(column))
            assert {name: x for name, x in far.items() if x > BOUNDS[column]} == {}
        elif expected.verdict == "equal" and column != "weights_only":  # whose status is all
            getattr(self, f"check_{column}")()

    @cache  # noqa: B019  # as long as the module's fixture
    def run(self, column: str) -> Ended:
        """Run a cell's last command; those before it must work."""
        if column == "resume":
            kill = "+callbacks.kill._target_=tests.packages.kill.Kill"
            words = (kill, "checkpoint.every_n_steps=1", "resume=auto")
            killed = self.train(column, "cpu", *words)
            assert killed.returncode == -signal.SIGKILL, killed.stderr
            return self.train(column, "cpu", *words)
        if column in ("train", "ddp", "dp"):
            on_two = () if column == "train" else ("trainer.devices=2",)
            return self.train(column, "cpu" if column == "train" else column, *on_two)
        assert self.run("train").returncode == 0, self.run("train").stderr
        best = self.of_run("train", "checkpoints", "best.ckpt")
        if column == "weights_only":
            load = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
            return self.command("-c", load, best)
        if column == "convert":
            words = ("-o", self.folder / "weights.pt", *self.words.get(column, ()))
            return self.command("-m", "harness.convert", best, *words)
        return self.command(ROOT / f"{column}.py", f"checkpoint={best}", *quiet("cpu"))

    def train(self, column: str, strategy: str, *words: str) -> Ended:
        """Run train.py."""
        conf = Path(__file__).with_name("conf")
        mine = (f"hydra.searchpath=[file://{conf}]", f"experiment={self.name}", *quiet(strategy))
        mine += (f"output_dir={self.folder / column}", *self.words.get(column, ()))
        return self.command(ROOT / "train.py", *mine, *words)

    def command(self, *arguments: str | Path) -> Ended:
        """Run Python in the folder that holds the data; more than five minutes are an error."""
        allowed = f"{os.environ['YAML_ALLOWED']},{NAMED}"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # Lightning's own switch: its MNIST without torchvision.
        switches = {"PYTHONPATH": path, "PL_USE_MOCKED_MNIST": "1", "YAML_ALLOWED": allowed}
        os.chdir(self.folder)
        try:
            return command(*arguments, environment=switches)
        finally:
            os.chdir(ROOT)

    def of_run(self, column: str, *parts: str) -> Path:
        """A file of the only run of a column."""
        (found,) = (self.folder / column / self.name).iterdir()
        return found.joinpath(*parts)

    def weights(self, column: str) -> dict[str, Any]:
        """The last weights of a run."""
        found = tensors(self.of_run(column, "checkpoints", "last.ckpt"))
        return {name: value for name, value in found.items() if value.numel()}

    def check_train(self) -> None:
        """A run that works leaves its results."""
        assert self.of_run("train", "results.json").is_file()

    def check_evaluate(self) -> None:
        """The test gives what it gave after training."""
        (evaluated,) = self.of_run("train", "evaluate").iterdir()
        after, found = (
            json.loads((folder / "results.json").read_text())
            for folder in (self.of_run("train"), evaluated)
        )
        for name in (name for name in found if name.startswith("test")):
            assert abs(found[name] - after[name]) <= 1e-6 * max(1, abs(after[name])), name

    def check_predict(self) -> None:
        """Something was predicted."""
        files = self.of_run("train", "predict").glob("*/predictions.*")
        assert [path for path in files if path.stat().st_size]

    def check_convert(self) -> None:
        """Plain weights of the network, equal to the checkpoint's, less what comes before it."""
        converted = torch.load(self.folder / "weights.pt", weights_only=True)
        whole = tensors(self.of_run("train", "checkpoints", "best.ckpt"))
        assert converted
        for name, weight in converted.items():
            same = [whole[key] for key in whole if f".{key}".endswith(f".{name}")]
            assert any(torch.equal(weight, one) for one in same), name


def quiet(strategy: str) -> tuple[str, ...]:
    """Return the overrides of every command."""
    progress = "trainer.enable_progress_bar=false"
    return f"strategy={strategy}", "trainer.accelerator=cpu", progress


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that this test has made, whatever else is in it."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
