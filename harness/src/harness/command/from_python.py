"""Train, evaluate and predict from a notebook or a script, with the run folders of a command.

In: overrides, as in a command. Out: a ``Run``. Next: ``compose``, then ``main.start_command``.

from harness import train
run = train("model=mlp", "trainer.max_epochs=3")
run.results["test/accuracy"], run.model, run.table
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from harness import targets
from harness.command import run_folder
from harness.command.compose import compose_command
from harness.command.main import start_command
from harness.distributed import shutdown
from harness.errors import UserError
from harness.files import best_checkpoint
from harness.runs.reading import read_table

if TYPE_CHECKING:
    import polars
    import pytorch_lightning as pl


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder, which each attribute reads at its first use.

    The ``rules.yaml`` in the folder ``conf`` lists the names that the run's config may use.
    """

    folder: Path
    conf: Path = Path("conf")

    @cached_property
    def config(self) -> DictConfig:
        """Return the run's whole config."""
        return run_folder.resolved(run_folder.load_config(self.folder))

    @cached_property
    def results(self) -> dict[str, float]:
        """Return the last value of every metric; empty while the run has not finished."""
        return run_folder.results(self.folder)

    @cached_property
    def table(self) -> "polars.DataFrame":
        """Return ``metrics.csv``: ``step``, then a column per metric with nulls in its gaps.

        ``run.table.select("step", "val/loss").drop_nulls()`` is a learning curve.
        """
        return read_table(self.folder / "metrics.csv")

    @cached_property
    def model(self) -> "pl.LightningModule":
        """Return the module with the weights that were tested, on the CPU, ready for evaluation.

        Raises:
            UserError: if the run has no checkpoint, or its config has a name that is not allowed.
        """
        self._load_rules()
        from harness.training.train import load_model

        return load_model(self.config, self.checkpoint)

    @cached_property
    def data(self) -> "pl.LightningDataModule | None":
        """Return the data module, before its ``prepare_data`` and ``setup``; None with data=null.

        Raises:
            UserError: if the run's config has a name that is not allowed.
        """
        self._load_rules()
        from harness.training.train import load_data

        return load_data(self.config)

    def _load_rules(self) -> None:
        if not (self.conf / targets.RULES).is_file():
            raise UserError(
                f"{self.conf / targets.RULES} does not exist. This file must list the packages "
                "that the run's config names.\n"
                "Use load_run(<folder>, conf=<the folder of the config files>)."
            )
        targets.load_rules(self.conf)

    @property
    def checkpoint(self) -> Path:
        """Return the tested checkpoint: the best one. Raise a UserError if the run has none."""
        if (path := best_checkpoint(self.folder)) is None:
            raise UserError(
                f"The run in {self.folder} has no checkpoint, so there are no weights.\n"
                f"Train it first: python train.py resume={self.folder}"
            )
        return path


def load_run(folder: str | Path, conf: str | Path = "conf") -> Run:
    """Return the run in a folder, finished or not; raise a UserError if the folder has no run."""
    run = Run(Path(folder).resolve(), Path(conf).resolve())
    _ = run.config
    return run


def train(*overrides: str, conf: str | Path = "conf") -> Run:
    """Train, and test the best checkpoint, as ``train.py`` does with these overrides.

    Raises:
        UserError: a setting is wrong; the message says what to type instead.
        KeyboardInterrupt: Ctrl-C. After the first step a checkpoint is saved: use ``resume=auto``.
    """
    return _start("train", overrides, conf)


def evaluate(checkpoint: str | Path, *overrides: str, conf: str | Path = "conf") -> Run:
    """Test a checkpoint, as ``evaluate.py`` does; arguments and errors as in ``train``."""
    return _start("evaluate", (f"checkpoint={checkpoint}", *overrides), conf)


def predict(checkpoint: str | Path, *overrides: str, conf: str | Path = "conf") -> Path:
    """Write the predictions of a checkpoint, as ``predict.py`` does, and return the CSV's path."""
    run = _start("predict", (f"checkpoint={checkpoint}", *overrides), conf)
    return Path(run.config.output)


def _start(task: str, overrides: tuple[str, ...], conf: str | Path) -> Run:
    with _surviving():
        command = compose_command(task, overrides, conf)
        return Run(start_command(command), command.conf)


@contextmanager
def _surviving() -> Iterator[None]:
    """Keep the caller's process alive in the block, and restore its signal handlers afterwards."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
        before = {number: signal.getsignal(number) for number in shutdown.EXIT_SIGNALS}
    shutdown.is_notebook = True
    try:
        yield
    except SystemExit as error:  # from Lightning, or after a checkpoint was saved
        if error.code in (1, 128 + signal.SIGINT):
            raise KeyboardInterrupt from None  # the run has printed where it saved
        raise
    except UserError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise UserError(str(error)) from None  # without the traceback through Hydra
    finally:
        shutdown.is_notebook = False
        for number, handler in before.items():
            signal.signal(number, handler)
