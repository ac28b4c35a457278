"""Finds and watches the processes that Lightning starts.

Its own observer looks every five seconds, kills the first process without naming the rank that
ended, and does so as well where all processes leave as agreed: the exit status and the last
checkpoint of such a run would be lost. Launchers have no public class. Seen in Lightning 2.6.
"""

import subprocess
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.strategies.launchers import multiprocessing, subprocess_script

PRIVATE = (
    "pytorch_lightning.strategies.launchers.subprocess_script:_launch_process_observer",
    "pytorch_lightning.strategies.launchers.multiprocessing:_MultiProcessingLauncher",
)

Processes = list[subprocess.Popen[Any]]


def replace_process_observer(start: Callable[[Processes], None]) -> None:
    """Let Lightning call ``start`` with the processes of the later ranks, and no observer."""
    subprocess_script._launch_process_observer = start  # type: ignore[assignment,attr-defined]


def is_spawning(trainer: pl.Trainer) -> bool:
    """Whether training runs in spawned or forked processes, and this one only waits for them."""
    return isinstance(trainer.strategy.launcher, multiprocessing._MultiProcessingLauncher)


def started_processes(trainer: pl.Trainer) -> Processes:
    """The processes that this one has started with the same command; none under torchrun."""
    return list(getattr(trainer.strategy.launcher, "procs", []))
