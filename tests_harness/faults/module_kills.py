"""Kill runs of real modules in every way, go on with the same command, and compare what is left."""

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests_harness.faults.fast_command import Forked, members, start, wait_until_gone
from tests_harness.faults.kills import num_steps, same_run, wait_for_step, weights
from tests_harness.faults.real_modules import CONFIGURATIONS, words

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
TOLD = ("Checkpoints lack ", "These are as in a run that begins")
HANGS_AFTER = 120  # seconds


@dataclass
class Outcome:
    """A configuration that was run to its end several times, and what differs."""

    num_runs: int = 0
    faults: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    num_equal: int = 0
    num_told: int = 0
    num_hangs: int = 0
    failures: list[str] = field(default_factory=list)  # ends that are neither

    @property
    def num_silent(self) -> int:
        """Runs that differ, and nothing said so."""
        return self.num_runs - self.num_equal - self.num_told - len(self.failures)


def command(name: str, folder: Path, num_processes: int | None = None) -> list[str]:
    """The words of a configuration's command."""
    trace = "+callbacks.trace"
    return [
        *words(name, folder, num_processes),
        *RUN,
        f"{trace}._target_=tests_harness.faults.trace.Trace",
        f"{trace}.folder={folder}/trace",
        f"{trace}.seconds_per_batch={SECONDS_PER_BATCH}",
        f"output_dir={folder}/outputs",
    ]


def finish(name: str, folder: Path, num_processes: int | None = None) -> str:
    """Let a run go to its end; what is wrong with how it has ended, or nothing."""
    process = start(command(name, folder, num_processes), folder / "log")
    if not wait_until_gone(process.pid, HANGS_AFTER):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "hangs"
    status = process.wait()
    return f"status {status}" if status else ""


def storm(name: str, folder: Path, rng: random.Random, num: int, kills_per_run: int = 3) -> Outcome:
    """Kill a configuration ``num`` times, in several runs that all end."""
    shutil.rmtree(folder, ignore_errors=True)
    reference, run = folder / "reference", folder / "run"
    result = Outcome()
    if wrong := finish(name, reference):
        said = (reference / "log").read_text()[-1500:]
        result.num_runs, result.failures = 1, [f"undisturbed: {wrong}: {said}"]
        return result
    while len(result.faults) < num and not result.failures:
        shutil.rmtree(run, ignore_errors=True)
        mine = min(kills_per_run, num - len(result.faults))
        faults = [fault for _ in range(mine) if (fault := kill(name, run, rng, result))]
        result.num_runs += 1
        result.faults += faults
        if wrong := finish(name, run):
            said = (run / "log").read_text()[-3000:]
            result.failures.append(f"{faults}: {wrong}: {said}")
            result.num_hangs += wrong == "hangs"
            break
        differences = same_run(run, reference)
        if not differences:
            result.num_equal += 1
        elif any(text in (run / "log").read_text() for text in TOLD):
            result.num_told += 1
        else:
            result.differences += [f"{faults}: {differences[:4]}"]
    return result


def kill(name: str, folder: Path, rng: random.Random, result: Outcome) -> str:
    """Start or go on with a run, and strike at a random moment; what was done, if anything."""
    chosen = CONFIGURATIONS[name]
    before = num_steps(folder)
    process = start(command(name, folder), folder / "log")
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
    if process.poll() is not None:
        wait_until_gone(process.pid, HANGS_AFTER)
        return ""  # it was faster
    is_struck = strike(process, folder, way, rng)
    if not wait_until_gone(process.pid, HANGS_AFTER):
        result.num_hangs += 1
        os.killpg(process.pid, signal.SIGKILL)
    process.poll()
    return f"{way} after {num_steps(folder) - before} steps" if is_struck else ""


def chain(name: str, folder: Path, rng: random.Random) -> tuple[float, str]:
    """Kill a run on two, on three and on one process; it ends on three.

    Returns:
        The largest difference of a weight from a run of one process, and what went wrong.
    """
    shutil.rmtree(folder, ignore_errors=True)
    reference, run = folder / "reference", folder / "run"
    wrong = finish(name, reference, num_processes=1)
    for num_processes in (2, 3, 1):
        before = num_steps(run)
        process = start(command(name, run, num_processes), run / "log")
        wait_for_step(process, run, before + rng.randrange(3, 12))
        signum = rng.choice([signal.SIGKILL, signal.SIGTERM])
        if process.poll() is None:
            os.killpg(process.pid, signum)
        if not wait_until_gone(process.pid, HANGS_AFTER):
            os.killpg(process.pid, signal.SIGKILL)
            wrong += f" {signum.name} of {num_processes}: hangs"
        process.poll()
    wrong += finish(name, run, num_processes=3)
    if wrong:
        return float("inf"), wrong
    one, other = weights(reference), weights(run)
    return max(float((one[key] - other[key]).abs().max()) for key in one), ""


def strike(process: Forked, folder: Path, way: str, rng: random.Random) -> bool:
    """Send the signal; whether there was somebody to send it to."""
    try:
        if way == "kill all":
            os.killpg(process.pid, signal.SIGKILL)
        elif way == "SIGTERM":
            os.killpg(process.pid, signal.SIGTERM)
        elif way == "kill a worker":
            end = time.monotonic() + 1
            while not (workers := data_workers(process.pid)):
                if time.monotonic() > end or process.poll() is not None:
                    os.killpg(process.pid, signal.SIGKILL)
                    return False
            os.kill(rng.choice(workers), signal.SIGKILL)
        else:
            signum = signal.SIGTERM if "SIGTERM" in way else signal.SIGKILL
            os.kill(int((folder / "trace" / f"pid_{way[-1]}").read_text()), signum)
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
