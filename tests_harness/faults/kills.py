"""Kill runs at random moments, go on with the same command, and compare with one that was not."""

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests_harness.faults.fast_command import Forked, start, wait_until_gone
from tests_harness.faults.run_folder import contents, differences

RUN = (
    "data=synthetic",
    "model=mlp",
    "strategy=cpu",
    "trainer.accelerator=cpu",
    "data.batch_size=100",
    "data.noise=0.1",
    "trainer.max_epochs=3",  # of 13 steps
    "trainer.log_every_n_steps=2",
    "trainer.enable_progress_bar=false",
    "trainer.val_check_interval=5",
    "callbacks.confusion_matrix=null",
    "callbacks.worst_mistakes=null",
    "checkpoint.every_n_steps=3",
    "+callbacks.trace._target_=tests_harness.faults.trace.Trace",
    "resume=auto",
)
NUM_STEPS = 39
SECONDS_PER_BATCH = 0.01


@dataclass
class Trial:
    """One run that was stopped now and then, and went on until it was finished."""

    faults: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    max_weight_difference: float = 0.0
    hangs: int = 0


def command(folder: Path, num_processes: int, *overrides: str) -> list[str]:
    """The command of a trial."""
    several = ["strategy=ddp", f"trainer.devices={num_processes}"] if num_processes > 1 else []
    trace = [f"+callbacks.trace.folder={folder}/trace"]
    slow = [f"+callbacks.trace.seconds_per_batch={SECONDS_PER_BATCH}"]
    return [*RUN, *several, *trace, *slow, f"output_dir={folder}/outputs", *overrides]


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
    """The only run of a trial; a folder that was made and not filled is none."""
    (found,) = (folder / "outputs" / "default").glob("*/overrides.yaml")
    return found.parent


def finish(folder: Path, num_processes: int, *overrides: str) -> None:
    """Let a run go to its end."""
    process = start(command(folder, num_processes, *overrides), folder / "log")
    status = process.wait(300)
    assert status == 0, (folder / "log").read_text()[-2000:]


def weights(folder: Path) -> dict[str, Any]:
    """The weights at the end."""
    checkpoint = torch.load(run_dir(folder) / "checkpoints" / "last.ckpt", weights_only=True)
    state: dict[str, Any] = checkpoint["state_dict"]
    return state


def same_run(folder: Path, reference: Path) -> list[str]:
    """What differs between two finished runs, apart from where they are."""

    def of(which: Path) -> dict[str, Any]:
        found = contents(run_dir(which))
        for name, value in found.items():
            if name.endswith(".ckpt"):
                value["callbacks"] = {
                    key: {k: v for k, v in state.items() if "path" not in k and "best_k" not in k}
                    for key, state in value["callbacks"].items()
                }
                for state in value["callbacks"].values():
                    state.pop("dirpath", None)
        return found

    ours, theirs = of(folder), of(reference)
    # Which of the earlier steps are kept depends on when the run was stopped.
    extra = {name for name in ours.keys() ^ theirs.keys() if name.startswith("step_")}
    both = ({n: v for n, v in found.items() if n not in extra} for found in (theirs, ours))
    return differences(*both)


def trial(
    folder: Path, rng: random.Random, *settings: str, worlds: list[int], storm: bool, num: int
) -> Trial:
    """Stop a run ``num`` times, each time after a random time of training."""
    shutil.rmtree(folder, ignore_errors=True)
    result = Trial()
    for _ in range(num):
        num_processes = rng.choice(worlds)
        before = num_steps(folder)
        process = start(command(folder, num_processes, *settings), folder / "log")
        wait_for_step(process, folder, before)
        end = time.monotonic() + rng.uniform(0, 1.3 * NUM_STEPS * SECONDS_PER_BATCH)
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        if process.poll() is not None:
            break  # it was faster
        signum = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
        victim = rng.choice(["group", *range(num_processes)]) if storm else "group"
        if not storm:
            signum = signal.SIGKILL
        strike(process, folder, signum, victim)
        result.faults.append(f"{signum.name} to {victim} of {num_processes}")
        if not wait_until_gone(process.pid, 120):
            result.hangs += 1
            os.killpg(process.pid, signal.SIGKILL)
        process.poll()
    finish(folder, worlds[-1], *settings)
    return result


def strike(process: Forked, folder: Path, signum: signal.Signals, victim: str | int) -> None:
    """Send a signal to the whole process group, or to one rank."""
    try:
        if victim == "group":
            os.killpg(process.pid, signum)
        else:
            os.kill(int((folder / "trace" / f"pid_{victim}").read_text()), signum)
    except ProcessLookupError:
        pass  # it has just ended
    process.poll()


def kills(folder: Path, num_processes: int, num_faults: int, seed: int) -> list[Trial]:
    """kill -9 of all processes at random moments; the end must be equal by bit."""
    rng = random.Random(seed)
    reference = folder / "reference"
    shutil.rmtree(reference, ignore_errors=True)
    finish(reference, num_processes, "model.net.dropout=0.2")
    trials: list[Trial] = []
    while sum(len(t.faults) for t in trials) < num_faults:
        t = trial(
            folder / "run", rng, "model.net.dropout=0.2",
            worlds=[num_processes], storm=False, num=3,
        )  # fmt: skip
        t.differences = same_run(folder / "run", reference)
        trials.append(t)
    return trials


def storms(
    folder: Path, num_faults: int, seed: int, most_processes: int, precision: str
) -> list[Trial]:
    """Any signal to any victim, any number of processes; the weights must be the same."""
    rng = random.Random(seed)
    reference = folder / "reference"
    shutil.rmtree(reference, ignore_errors=True)
    settings = (f"trainer.precision={precision}",)
    finish(reference, 1, *settings)
    expected = weights(reference)
    trials: list[Trial] = []
    while sum(len(t.faults) for t in trials) < num_faults:
        worlds = rng.sample(range(1, most_processes + 1), k=most_processes)
        t = trial(folder / "run", rng, *settings, worlds=worlds, storm=True, num=5)
        found = weights(folder / "run")
        t.max_weight_difference = max(
            float((found[name] - expected[name]).abs().max()) for name in expected
        )
        trials.append(t)
    return trials
