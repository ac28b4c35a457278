"""Kill runs of real modules in every way, go on with the same command, and compare what is left."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.fast_command import Forked, members, start, wait_until_gone
from tests.faults.real_modules import CONFIGURATIONS, words
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
# What a run says of a state that is not kept.
TOLD = ("Checkpoints lack ", "These are not as they were")
HANGS_AFTER = 120  # seconds


def command(name: str, folder: Path) -> list[str]:
    """The words of a configuration's command."""
    slow = f"+callbacks.trace.seconds_per_batch={SECONDS_PER_BATCH}"
    return [*words(name, folder), *RUN, slow, *traced(folder)]


def traced(folder: Path) -> list[str]:
    """The words of a run below a folder whose progress is seen from outside."""
    return [
        "+callbacks.trace._target_=tests.faults.trace.Trace",
        f"+callbacks.trace.folder={folder}/trace",
        f"output_dir={folder}/outputs",
    ]


def begin(name: str, folder: Path) -> Forked:
    """Start a run, or go on with it; what it says is in a file ``log``."""
    return start(command(name, folder), folder / "log")


def finish(name: str, folder: Path) -> str:
    """Let a run go to its end; what is wrong with how it has ended, or nothing."""
    process = begin(name, folder)
    if not is_over(process):
        return "hangs"
    status = process.wait()
    return f"status {status}: {(folder / 'log').read_text()[-3000:]}" if status else ""


def is_over(process: Forked) -> bool:
    """Whether all processes of a run leave; they are killed if not."""
    is_gone = wait_until_gone(process.pid, HANGS_AFTER)
    if not is_gone:
        os.killpg(process.pid, signal.SIGKILL)
    process.poll()
    return is_gone


def num_steps(folder: Path) -> int:
    """How many batches the first process has done, all attempts together."""
    path = folder / "trace" / "steps_0"
    return path.stat().st_size if path.exists() else 0


def wait_for_step(process: Forked, folder: Path, before: int, seconds: float = 300) -> None:
    """Wait until an attempt trains."""
    end = time.monotonic() + seconds
    while num_steps(folder) <= before and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


def run_dir(folder: Path) -> Path:
    """The only run below a folder; one that was made and not filled is none."""
    (found,) = (folder / "outputs" / "default").glob("*/overrides.yaml")
    return found.parent


def pid_of(folder: Path, rank: int) -> int:
    """The process of a rank."""
    return int((folder / "trace" / f"pid_{rank}").read_text())


def same_run(folder: Path, reference: Path) -> list[str]:
    """What differs between two finished runs, apart from where they are."""

    def of(which: Path) -> dict[str, Any]:
        found = contents(run_dir(which))
        for checkpoint in (value for name, value in found.items() if name.endswith(".ckpt")):
            for state in checkpoint["callbacks"].values():
                for key in [k for k in state if "path" in k or "best_k" in k]:
                    del state[key]
        return found

    ours, theirs = of(folder), of(reference)
    # Which of the earlier steps are kept depends on when the run was stopped.
    extra = {name for name in ours.keys() ^ theirs.keys() if name.startswith("step_")}
    both = ({n: v for n, v in found.items() if n not in extra} for found in (theirs, ours))
    return differences(*both)


def storm(name: str, folder: Path, rng: random.Random, num: int) -> list[str]:
    """Kill a configuration ``num`` times, in runs that all end; what is lost, and not reported."""
    reference, run = folder / "reference", folder / "run"
    if wrong := finish(name, reference):
        return [f"undisturbed: {wrong}"]
    faults: list[str] = []
    while len(faults) < num:
        shutil.rmtree(run, ignore_errors=True)
        mine = [fault for _ in range(3) if (fault := kill(name, run, rng))]
        faults += mine
        if "hangs" in mine:
            return [f"{mine}: {(run / 'log').read_text()[-3000:]}"]
        if wrong := finish(name, run):
            return [f"{mine}: {wrong}"]
        is_reported = any(text in (run / "log").read_text() for text in TOLD)
        if (differing := same_run(run, reference)) and not is_reported:
            return [f"{mine}: {differing[:4]}"]
    return []


def kill(name: str, folder: Path, rng: random.Random) -> str:
    """Start or go on with a run, and strike at a random moment; what was done, if anything."""
    chosen = CONFIGURATIONS[name]
    before = num_steps(folder)
    process = begin(name, folder)
    ways = ["kill all"] * 3 + ["SIGTERM"] + ["kill a worker"] * 2 * chosen.has_workers
    ways += ["kill rank 1", "kill rank 0", "SIGTERM rank 1"] * (chosen.num_processes > 1)
    way = rng.choice(ways)
    if rng.random() < EARLY and way == "kill all":
        seconds = rng.uniform(0, SECONDS_TO_START)
    else:
        wait_for_step(process, folder, before + rng.randrange(MOST_STEPS))
        seconds = rng.uniform(0, 3 * SECONDS_PER_BATCH)
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    is_struck = process.poll() is None and strike(process, folder, way, rng)
    if not is_over(process):
        return "hangs"
    return f"{way} after {num_steps(folder) - before} steps" if is_struck else ""


def strike(process: Forked, folder: Path, way: str, rng: random.Random) -> bool:
    """Send the signal; whether there was somebody to send it to."""
    signum = signal.SIGTERM if "SIGTERM" in way else signal.SIGKILL
    try:
        if way in ("kill all", "SIGTERM"):
            os.killpg(process.pid, signum)
        elif way == "kill a worker":
            end = time.monotonic() + 1
            while not (workers := data_workers(process.pid)):
                if time.monotonic() > end or process.poll() is not None:
                    os.killpg(process.pid, signal.SIGKILL)
                    return False
            os.kill(rng.choice(workers), signum)
        else:
            os.kill(pid_of(folder, int(way[-1])), signum)
    except ProcessLookupError:
        return False  # it has just ended
    return True


def data_workers(group: int) -> list[int]:
    """The living data workers of a run."""
    found = []
    for pid in members(group):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == WORKER:
                found.append(pid)
        except OSError:
            continue
    return found
