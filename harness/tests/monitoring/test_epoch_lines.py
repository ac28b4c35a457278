"""A line per epoch stays on the screen, in 80 columns, in a file and in run.log."""

import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from tests.conftest import ci, train_command
from tests.faults.fork_server import command
from tests.modules.classifiers import Classifier
from tests.strategy_runs import write_conf

SHORT = (
    "data=synthetic",
    "data.num_train=640",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
)
LINE = re.compile(r"^epoch (\d)  train/loss \d\.\d{3}  .*\d\.\d s$", re.MULTILINE)
LONG = "/a/path/that/is/longer/than/a/line/of/the/terminal/and/is/to/be/copied/as/a/whole/from/it"


class Logs(Classifier):
    """Logs more values than fit into a line, and warns with a path."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for i in range(5):
            self.log(f"train/another_name_of_some_length_{i}", loss, prog_bar=True)
        if batch_idx == 3:
            logging.getLogger("harness.tests").warning(LONG)
        time.sleep(0.1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        for i in range(9):
            self.log(f"val/{i}", float(i), prog_bar=True)
        self.log("val/the_objective", 0.123)


@pytest.mark.parametrize("is_bar", ["true", *ci("false")])
def test_every_epoch_has_a_line_where_the_screen_is_a_file(is_bar: str, tmp_path: Path) -> None:
    words = (*SHORT, "model=mlp", f"trainer.enable_progress_bar={is_bar}")
    run_dir = train_command(tmp_path, *words)
    screen = (tmp_path / "screen.txt").read_text()
    assert LINE.findall(screen) == ["0", "1"]
    assert "Epoch 1/1" not in screen  # a bar is of a terminal
    assert all(line.group() in (run_dir / "run.log").read_text() for line in LINE.finditer(screen))
    resumed = train_command(tmp_path, f"resume={run_dir}", "trainer.max_epochs=3")
    assert resumed == run_dir
    assert LINE.findall((tmp_path / "screen.txt").read_text()) == ["2"]


class Stops(pl.Callback):
    def on_values(self, trainer: pl.Trainer, stage: str, epoch: int, *_: Any) -> None:
        trainer.should_stop = stage == "train_epoch" and epoch == 2


def test_epochs_without_a_row_show_what_their_steps_have_logged_and_a_stop_is_told(
    tmp_path: Path,
) -> None:
    groups = {"model": "_target_: tests.modules.classifiers.Classifier\n"}
    words = write_conf(
        tmp_path, data="_target_: tests.parity.test_final_values.Flowery\n", **groups
    )
    words += ["trainer.precision=64-true", "trainer.max_epochs=9", "objective=val/loss", "mode=min"]
    train_command(tmp_path, *words, f"+callbacks.stops._target_={__name__}.Stops", "test=false")
    screen = (tmp_path / "screen.txt").read_text()  # of five batches an epoch, and a row every ten
    assert LINE.findall(screen) == ["0", "1", "2"]
    assert "stopped early    after 3 epochs of 9: trainer.should_stop was set" in screen


class PerClass(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MulticlassAccuracy(3, average=None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric(self(batch[0]), batch[1])
        self.log("val/per_class", self.metric)


def test_a_metric_of_several_values_is_named_with_what_to_write(tmp_path: Path) -> None:
    groups = {"data": "_target_: tests.parity.test_final_values.Flowery\n"}
    words = write_conf(tmp_path, model=f"_target_: {__name__}.PerClass\n", **groups)
    words += ["trainer.precision=64-true", "test=false", f"output_dir={tmp_path}"]
    ended = command("train.py", *words)
    assert ended.returncode == 1
    assert "self.log('val/per_class', ...) got 3 values, but logs only one" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_terminal_of_80_columns_has_a_line_for_the_epoch_and_one_for_the_bar(
    tmp_path: Path,
) -> None:
    groups = {"data": "_target_: tests.parity.test_final_values.Flowery\n"}
    words = write_conf(tmp_path, model=f"_target_: {__name__}.Logs\n", **groups)
    words += ["trainer.precision=64-true", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"]
    words += ["objective=val/the_objective", "mode=min", "test=false", f"output_dir={tmp_path}"]
    # rich takes stdout for a terminal.
    ended = command("train.py", *words, environment={"FORCE_COLOR": "1", "COLUMNS": "80"})
    assert ended.returncode == 0, ended.stderr
    shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "\n", ended.stdout + ended.stderr).replace("\r", "\n")
    lines = [line.rstrip() for line in shown.splitlines()]
    assert LONG in "\n".join(lines)
    of_epochs = [line for line in lines if line.startswith("epoch ")]
    assert len(of_epochs) == 2
    assert all(len(line) <= 80 for line in of_epochs)
    assert all("val/the_objective 0.123" in line and line.endswith(" s") for line in of_epochs)
    drawn = re.sub(r"\x1b\[[\d;]*m", "", ended.stdout)
    bars = [line for part in drawn.split("\x1b[2K") for line in part.splitlines() if "it/s" in line]
    assert bars
    assert all(len(re.sub(r"\x1b\[.*?[A-Za-z]", "", line).rstrip()) <= 80 for line in bars)
    assert not any(re.search(r"\b0.00it/s", line) for line in bars)
    assert any("val/loss" in line for line in bars)  # it fits into the line


def test_a_reader_that_ends_ends_nothing(tmp_path: Path) -> None:
    program = (
        "import sys, time; from harness.errors import outlive_readers; outlive_readers()\n"
        "for i in range(9999): print('a line', i, flush=True)\n"
        "print('told', file=sys.stderr); open(sys.argv[1], 'w').close()"
    )
    written = tmp_path / "written"
    pipe = subprocess.Popen([sys.executable, "-c", program, written], stdout=-1, stderr=-1)
    assert pipe.stdout is not None
    pipe.stdout.readline()
    pipe.stdout.close()
    assert pipe.stderr is not None
    assert pipe.stderr.read() == b"told\n"
    assert pipe.wait() == 0
    assert written.exists()
    pipe.stderr.close()
