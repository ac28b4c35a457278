"""Signals to each process of a run: saved, the right status, in time, nobody left behind."""

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from project.checkpoints import files
from tests.faults.fast_command import start, wait_until_gone
from tests.faults.kills import command, run_dir, wait_for_step

STRATEGIES = {
    "cpu": 1,
    "dp": 1,
    "ddp": 2,
    "ddp2": 1,
    "ddp_spawn": 2,
}


@dataclass
class Outcome:
    """How a run has ended."""

    status: int
    seconds: float
    is_saved: bool
    is_gone: bool
    log: str


def hit(
    folder: Path,
    strategy: str,
    signum: signal.Signals,
    victim: str | int,
    num_workers: int = 0,
    twice: bool = False,
) -> Outcome:
    """Send a signal to a run that trains."""
    shutil.rmtree(folder, ignore_errors=True)
    devices = [] if strategy == "cpu" else ["trainer.devices=2"]
    settings = [f"strategy={strategy}", *devices, f"data.num_workers={num_workers}"]
    slow = ["trainer.max_epochs=500", "checkpoint.every_n_steps=null"]
    process = start(command(folder, 1, *settings, *slow), folder / "log")
    wait_for_step(process, folder, 3)
    started = time.monotonic()
    for _ in range(1 + twice):
        if victim == "group":
            os.killpg(process.pid, signum)
        else:
            os.kill(int((folder / "trace" / f"pid_{victim}").read_text()), signum)
    status = process.wait(60)
    is_gone = wait_until_gone(process.pid, 10)
    seconds = time.monotonic() - started
    if not is_gone:
        os.killpg(process.pid, signal.SIGKILL)
    saved = files.newest_whole(run_dir(folder) / "checkpoints")[0] is not None
    return Outcome(status, seconds, saved, is_gone, (folder / "log").read_text())
