"""Signals to each process of a run: saved, the right status, in time, nobody left behind."""

import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoints import lookup
from tests_harness.faults.fast_command import Forked, start, wait_until_gone
from tests_harness.faults.kills import command, run_dir, wait_for_step

STRATEGIES = {
    "cpu": 1,
    "dp": 1,
    "ddp": 2,
    "ddp2": 1,
}


SLOW_SECONDS = 30


@dataclass
class Outcome:
    """How a run has ended."""

    status: int
    seconds: float
    is_saved: bool
    is_gone: bool
    log: str

    def is_good(self, most_seconds: float) -> bool:
        """Whether the run has saved, and nobody is left after that time."""
        return self.is_saved and self.is_gone and self.seconds < most_seconds


def hit(
    folder: Path,
    strategy: str,
    signum: signal.Signals,
    victim: str | int,
    num_workers: int = 0,
    twice: bool = False,
    moment: str = "step",
) -> Outcome:
    """Send a signal to a run that trains, or is in a slow validation or in a slow test."""
    shutil.rmtree(folder, ignore_errors=True)
    num_ranks = STRATEGIES[strategy]
    devices = [] if strategy == "cpu" else ["trainer.devices=2"]
    settings = [f"strategy={strategy}", *devices, f"data.num_workers={num_workers}"]
    slow = ["trainer.max_epochs=500", "checkpoint.every_n_steps=null"]
    if moment != "step":
        slow = [
            "trainer.max_epochs=1",
            "checkpoint.every_n_steps=null",
            f"+callbacks.trace.seconds_per_{moment}={SLOW_SECONDS}",
        ]
    process = start(command(folder, 1, *settings, *slow), folder / "log")
    if moment == "step":
        wait_for_step(process, folder, 3)
    else:
        wait_for_files(process, [folder / "trace" / f"{moment}_{r}" for r in range(num_ranks)])
    started = time.monotonic()
    for _ in range(1 + twice):
        if victim == "group":
            os.killpg(process.pid, signum)
        else:
            os.kill(int((folder / "trace" / f"pid_{victim}").read_text()), signum)
    status = process.wait(300)
    is_gone = wait_until_gone(process.pid, 120)
    seconds = time.monotonic() - started
    if not is_gone:
        os.killpg(process.pid, signal.SIGKILL)
    newest, _ = lookup.newest_whole(run_dir(folder) / "checkpoints")
    expected = {"validation": "step_4", "test": "step_13"}.get(moment)  # of 5 and 13 steps
    saved = newest is not None and expected in (None, newest.stem)
    return Outcome(status, seconds, saved, is_gone, (folder / "log").read_text())


def wait_for_files(process: Forked, paths: list[Path], seconds: float = 300) -> None:
    """Wait until all of them are there."""
    end = time.monotonic() + seconds
    while not all(path.exists() for path in paths) and process.poll() is None:
        if time.monotonic() > end:
            break
        time.sleep(0.01)
