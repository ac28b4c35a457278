"""Leaves it to the harness to start, watch and stop the processes of a run.

On SIGTERM Lightning's handler waits in a broadcast for processes that got no signal: two processes
under ddp hung in 7 of 9 trials, and no checkpoint was written. Its observer looks every five
seconds, kills the first process without naming the rank that ended, and does so as well where all
processes leave as agreed. Launchers have no public class. Seen in Lightning 2.6.
"""

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies.launchers import subprocess_script

PRIVATE = {
    "trainer:_signal_connector": "register_signal_handlers",
    "pytorch_lightning.strategies.launchers.subprocess_script": "_launch_process_observer "
    "subprocess",
}

Processes = list[subprocess.Popen[Any]]


def keep_lightning_from_signals(trainer: pl.Trainer) -> None:
    """Let the Trainer install no handlers; call it before training, in each process."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def replace_process_observer(start: Callable[[Processes], None]) -> None:
    """Let Lightning call ``start`` with the processes of the later ranks, and no observer."""
    subprocess_script._launch_process_observer = start  # type: ignore[assignment,attr-defined]


def replace_starter(start: Callable[..., subprocess.Popen[Any]]) -> None:
    """Let Lightning call ``start`` instead of ``subprocess.Popen`` for each of the later ranks."""
    subprocess_script.subprocess = SimpleNamespace(Popen=start)  # type: ignore[assignment,attr-defined]


def started_processes(trainer: pl.Trainer) -> Processes:
    """The processes that this one has started with the same command; none under torchrun."""
    return list(getattr(trainer.strategy.launcher, "procs", []))
