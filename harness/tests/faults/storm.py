"""Kill runs of real modules in every way, resume by the same command, and compare the results."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.fast_command import Forked, members, start, wait_until_gone
from tests.faults.real_modules import DDP, WORKERS, words
from tests.faults.run_folder import contents, differences

RUN = (
    "trainer.accelerator=cpu",
    "trainer.max_epochs=8",
    "trainer.log_every_n_steps=2",
    "trainer.enable_progress_bar=false",
    "checkpoint.every_n_steps=3",
    "resume=auto",
)
SECONDS_PER_BATCH = 0.02
MOST_STEPS = 20  # of an attempt before it is struck; all the runs have about 40
EARLY = 0.15  # of the kills come before the first step of an attempt
SECONDS_TO_START = 2.0
WORKER = "pt_data_worker"  # how torch names the processes of its loaders
# The warning of a run about a state that is not saved.
NAMED = ("Checkpoints lack ", "The resumed run did not restore")
HANGS_AFTER = 120  # seconds


class Run:
    """A configuration's run below a folder; what it says is in the file ``log``."""

    def __init__(self, folder: Path, command: list[str], *more: str) -> None:
        self.folder, self.log = folder, folder / "log"
        self.command = [
            *command,
            "+callbacks.trace._target_=tests.faults.trace.Trace",
            f"+callbacks.trace.folder={folder}/trace",
            f"output_dir={folder}/outputs",
            *more,
        ]

    @classmethod
    def of(cls, name: str, folder: Path) -> "Run":
        """The run of a real module, with steps that are slow enough to hit."""
        slow = f"+callbacks.trace.seconds_per_batch={SECONDS_PER_BATCH}"
        return cls(folder, [*words(name, folder), *RUN], slow)

    def begin(self, num_steps: int = -1) -> Forked:
        """Start or resume it; wait until this attempt has done some steps, or has ended."""
        before, process = self.num_steps(), start(self.command, self.log)
        wait_until(lambda: process.poll() is not None or self.num_steps() > before + num_steps)
        return process

    def finish(self) -> None:
        """Let it go to its end."""
        assert self.end(self.begin()) == 0, self.log.read_text()[-3000:]

    def end(self, process: Forked, signum: int = 0, whom: int = 0) -> int:
        """Send a signal to an attempt or to one of its processes; its status when all have left."""
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(whom, signum) if whom else os.killpg(process.pid, signum)
        if not wait_until_gone(process.pid, HANGS_AFTER):
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {self.log.read_text()[-3000:]}")
        return process.wait()

    def num_steps(self) -> int:
        """Return how many batches rank 0 has done in all attempts."""
        path = self.folder / "trace" / "steps_0"
        return path.stat().st_size if path.exists() else 0

    def pid_of(self, rank: int) -> int:
        """The process of a rank."""
        return int((self.folder / "trace" / f"pid_{rank}").read_text())

    def run_dir(self) -> Path:
        """The only folder of a run; one that was made and not filled is none."""
        (found,) = (self.folder / "outputs" / "default").glob("*/overrides.yaml")
        return found.parent

    def contents(self) -> dict[str, Any]:
        """Return its results, without the paths of the folder."""
        found = contents(self.run_dir())
        for checkpoint in (value for name, value in found.items() if name.endswith(".ckpt")):
            for state in checkpoint["callbacks"].values():
                for key in [k for k in state if "path" in k or "best_k" in k]:
                    del state[key]
        return found

    def differences(self, other: "Run") -> list[str]:
        """Return the differences between two finished runs."""
        found = [one.contents() for one in (other, self)]
        # Which of the earlier steps are kept depends on when the run was stopped.
        for name in found[0].keys() ^ found[1].keys():
            if name.startswith("step_"):
                for one in found:
                    one.pop(name, None)
        return differences(*found)


def wait_until(is_so: Callable[[], object], seconds: float = 300) -> None:
    """Wait for something, or until the time is over."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.002)


def storm(name: str, folder: Path, rng: random.Random, num: int) -> Counter[str]:
    """Kill a configuration at least ``num`` times, in runs that all end.

    Returns:
        How many kills there were, by what came of them: "equal", or a difference that was "named".
    """
    reference, run = Run.of(name, folder / "reference"), Run.of(name, folder / "run")
    reference.finish()
    outcome = Counter[str]()
    while outcome.total() < num:
        shutil.rmtree(run.folder)
        run = Run.of(name, run.folder)
        kills = [way for _ in range(3) if (way := kill(run, rng))]
        run.finish()
        differing = run.differences(reference)
        is_named = any(text in run.log.read_text() for text in NAMED)
        assert is_named or not differing, f"{kills}: {differing[:4]}"
        outcome["named" if differing else "equal"] += len(kills)
    return outcome


def kill(run: Run, rng: random.Random) -> str:
    """Start or resume a run, and strike at a random moment; return the strike, if there was one."""
    ways = ["kill all"] * 3 + ["SIGTERM"] + ["kill a worker"] * 2 * (WORKERS in run.command)
    ways += ["kill rank 1", "kill rank 0", "SIGTERM rank 1"] * (DDP[0] in run.command)
    way, before = rng.choice(ways), run.num_steps()
    if rng.random() < EARLY and way == "kill all":
        process, seconds = run.begin(), rng.uniform(0, SECONDS_TO_START)
    else:
        process, seconds = run.begin(rng.randrange(MOST_STEPS)), rng.uniform(0, 0.06)
    wait_until(lambda: process.poll() is not None, seconds)
    if process.poll() is not None:
        run.end(process)
        return ""
    whom = run.pid_of(int(way[-1])) if "rank" in way else 0
    if way == "kill a worker":
        workers = [pid for pid, its_name in members(process.pid).items() if its_name == WORKER]
        whom = rng.choice(workers or [0])  # without one all are killed
    run.end(process, signal.SIGTERM if "SIGTERM" in way else signal.SIGKILL, whom)
    return f"{way} after {run.num_steps() - before} steps"
