"""Runs the cells of the table: commands as a user types them, with YAML files and nothing else."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.conftest import ROOT
from tests.packages import made_up_data
from tests.packages.expected import PACKAGES
from tests.verdicts.table import read

CONF = Path(__file__).with_name("conf")
# What conf/rules.yaml has to allow of a project that uses them; a method by its whole name.
NAMED = (
    "chemprop,deeptab,gluonts,nequip,pytorch_forecasting,rl4co,"
    "pytorch_forecasting.NBeats.from_dataset,"
    "pytorch_forecasting.TemporalFusionTransformer.from_dataset"
)
VERDICTS = read()
TIMEOUT_SECONDS = 300  # a command that takes longer hangs
BOUND = 1e-5  # of a weight's difference in single precision
ON_TWO = ("trainer.devices=2",)


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    said: str  # on both streams

    def check(self) -> None:
        """Fail unless it has worked."""
        assert self.status == 0, self.said[-2000:]

    def check_refused(self, says: str) -> None:
        """Fail unless it has ended with the sentence, and without a traceback."""
        assert self.status not in (0, None), f"was not refused: {self.said[-1000:]}"
        assert "Traceback (most recent call last)" not in self.said, self.said[-3000:]
        assert says in self.said, self.said[-2000:]


class Cells:
    """The cells of one public module; a command that several of them need runs once.

    Args:
        name: of its experiment.
        folder: for its data and its runs.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.words = name, folder, PACKAGES[name]
        made_up_data.write_files(folder)

    def check(self, column: str) -> None:
        """Fail unless a cell is what the table says."""
        expected = VERDICTS["public", self.name, column]
        if expected.verdict == "refused":
            self.run(column).check_refused(expected.says)
            return
        self.run(column).check()
        assert expected.says in self.run(column).said
        if expected.verdict == "equal" and column != "weights_only":  # whose status is all
            getattr(self, f"check_{column}")()

    @cache  # noqa: B019  # as long as the module's fixture
    def run(self, column: str) -> Ended:
        """Run a cell's last command; those before it must work."""
        if column in ("train", "ddp", "dp", "resume"):
            return getattr(self, f"run_{column}", self.run_train)(column)
        self.run("train").check()
        if column == "weights_only":
            program = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
            ended = self.command("-c", program, self.best)
            # torch's own traceback is that of the one line above.
            return Ended(ended.status, ended.said.replace("Traceback (most recent call last)", ""))
        if column == "convert":
            words = ("-o", self.folder / "weights.pt", *self.words.get(column, ()))
            return self.command("-m", "harness.convert", self.best, *words)
        script = ROOT / f"{column}.py"
        checkpoint = f"checkpoint={self.best}"
        return self.command(script, checkpoint, *self.quiet("cpu"))

    def run_train(self, column: str) -> Ended:
        """Train, on two devices where the column is a strategy."""
        more = () if column == "train" else ON_TWO
        return self.train(column, "cpu" if column == "train" else column, *more)

    def run_resume(self, column: str) -> Ended:
        """Train until the run kills itself, and go on."""
        kill = "tests.packages.kill.Kill"
        words = (
            f"+callbacks.kill._target_={kill}",
            f"+callbacks.kill.done={self.folder / 'killed'}",
            "checkpoint.every_n_steps=1",
            "resume=auto",
        )
        killed = self.train(column, "cpu", *words)
        if killed.status != -9:
            return killed
        return self.train(column, "cpu", *words)

    def train(self, column: str, strategy: str, *words: str) -> Ended:
        """Run train.py."""
        return self.command(
            ROOT / "train.py",
            f"hydra.searchpath=[file://{CONF}]",
            f"experiment={self.name}",
            f"output_dir={self.folder / column}",
            *self.quiet(strategy),
            *self.words.get(column, ()),
            *words,
        )

    def quiet(self, strategy: str) -> tuple[str, ...]:
        """Words of every command."""
        progress = "trainer.enable_progress_bar=false"
        return (f"strategy={strategy}", "trainer.accelerator=cpu", progress)

    def command(self, *arguments: str | Path) -> Ended:
        """Run Python in the folder that holds the data."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # Lightning's own switch: its MNIST without torchvision.
        switches = {"PYTHONPATH": path, "PL_USE_MOCKED_MNIST": "1", "OMP_NUM_THREADS": "1"}
        switches["YAML_ALLOWED"] = f"{os.environ['YAML_ALLOWED']},{NAMED}"
        try:
            done = subprocess.run(
                [sys.executable, *map(str, arguments)],
                cwd=self.folder,
                env=os.environ | switches,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"hangs: {arguments}") from error
        return Ended(done.returncode, done.stdout + done.stderr)

    def run_folder(self, column: str) -> Path:
        """The only run of a column."""
        (found,) = (self.folder / column / self.name).iterdir()
        return found

    @property
    def best(self) -> Path:
        """The checkpoint of the first run that is evaluated and converted."""
        return self.run_folder("train") / "checkpoints" / "best.ckpt"

    def weights(self, column: str) -> dict[str, torch.Tensor]:
        """The last weights of a run."""
        return _weights(self.run_folder(column) / "checkpoints" / "last.ckpt")

    def compare(self, column: str, bound: float) -> None:
        """Fail where a weight of the column's run is not that of the plain one."""
        self.run("train").check()
        one, other = self.weights("train"), self.weights(column)
        assert one.keys() == other.keys()
        for name, weight in one.items():
            if weight.is_floating_point() and weight.numel():
                difference = float((weight - other[name]).abs().max())
                assert difference <= bound, f"{name} differs by {difference:.1e}"
            else:
                assert torch.equal(weight, other[name]), name

    def check_train(self) -> None:
        """A run that works leaves its results."""
        assert (self.run_folder("train") / "results.json").is_file()

    def check_ddp(self) -> None:
        """Two processes train what one does."""
        self.compare("ddp", BOUND)

    def check_dp(self) -> None:
        """Two logical devices train what one does."""
        self.compare("dp", BOUND)

    def check_resume(self) -> None:
        """A run that was killed ends as one that was not."""
        assert (self.folder / "killed").exists(), "the run was never killed"
        self.compare("resume", 0.0)

    def check_evaluate(self) -> None:
        """The test gives what it gave after training."""
        run = self.run_folder("train")
        (evaluated,) = (run / "evaluate").iterdir()
        after: dict[str, float] = json.loads((run / "results.json").read_text())
        found: dict[str, float] = json.loads((evaluated / "results.json").read_text())
        for name in (name for name in found if name.startswith("test")):
            assert abs(found[name] - after[name]) <= 1e-6 * max(1, abs(after[name])), name

    def check_predict(self) -> None:
        """Something was predicted."""
        (predicted,) = (self.run_folder("train") / "predict").iterdir()
        files = [path for path in predicted.glob("predictions.*") if path.stat().st_size]
        assert files

    def check_convert(self) -> None:
        """Plain weights of the network, equal to the checkpoint's, less what comes before it."""
        converted = torch.load(self.folder / "weights.pt", weights_only=True)
        of_checkpoint = _weights(self.best)
        assert converted
        for name, weight in converted.items():
            whole = [key for key in of_checkpoint if key == name or key.endswith(f".{name}")]
            assert any(torch.equal(weight, of_checkpoint[key]) for key in whole), name


def _weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that this test has made, whatever else is in it."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
