"""Kill sweeps of real runs at random moments, and compare with one that was never killed.

python -m tests_harness.sweeps               50 kills of a grid and of a study, some 20 minutes
python -m tests_harness.sweeps grid --num 2

A kill is that of the driver or of one of its jobs, and the same command goes on after each. Every
job must have finished once, with results.json and metrics.csv equal to those of the other sweep.
"""

import argparse
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import torch

from tests_harness import figures
from tests_harness.faults.fast_command import Forked, start
from tests_harness.figures import Rows

RUN = (
    *("-m", "data=synthetic", "model=mlp", "strategy=cpu", "watch=none", "trainer.max_epochs=3"),
    *("checkpoint.every_n_steps=3", "trainer.log_every_n_steps=2", "sweep.num_parallel=2"),
    *("callbacks.confusion_matrix=null", "callbacks.worst_mistakes=null"),
    "trainer.enable_progress_bar=false",
)
RANDOM = ("~sweep.sampler.constant_liar", "sweep.sampler._target_=optuna.samplers.RandomSampler")
KINDS = {
    "grid": ("model.optimizer.lr=0.001,0.003,0.01", "seed=1,2"),
    "study": (
        *("sweep=optuna", "sweep.num_trials=6", *RANDOM),
        *("model.optimizer.lr=tag(log,interval(1e-4,1e-2))", "seed=1,2"),
    ),
}


def sweep_of(folder: Path) -> Path | None:
    """The newest sweep of a folder, once there is one."""
    found = sorted(folder.glob("outputs/sweeps/*/*/overrides.yaml"))
    return found[-1].parent if found else None


def begin(kind: str, folder: Path, *words: str) -> Forked:
    typed = [*RUN, *KINDS[kind], "resume=auto", f"output_dir={folder}/outputs", *words]
    return start(typed, folder / "log")


def jobs_of(driver: Forked) -> list[int]:
    """The living jobs of a driver."""
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def wait_for_jobs(driver: Forked) -> None:
    """Wait until a driver has started its first job."""
    while driver.poll() is None and not jobs_of(driver):
        time.sleep(0.005)


def finished(folder: Path) -> dict[str, int]:
    """When each finished job has written its results."""
    sweep = sweep_of(folder)
    found = sweep.glob("*/results.json") if sweep else []
    return {path.parent.name: path.stat().st_mtime_ns for path in found}


def single(words: list[str], folder: Path) -> Path:
    """A run of the same words that no sweep has started."""
    process = start([*words, f"output_dir={folder}"], folder / "log")
    assert process.wait(300) == 0, (folder / "log").read_text()[-2000:]
    (found,) = folder.glob("*/*/results.json")
    return found.parent


def storm(kind: str, folder: Path, num: int, seed: int) -> Rows:
    """Kill a sweep until it has been killed often enough, in as many sweeps as that takes."""
    draw, kills = random.Random(seed), Counter[str]()
    wrong: list[str] = []
    num_sweeps = num_jobs = 0
    while kills.total() < num:
        there, before = folder / f"{kind}{num_sweeps}", dict[str, int]()
        num_sweeps += 1
        status = 1
        while status:
            driver = begin(kind, there)
            wants_kill = kills.total() < num
            if wants_kill and draw.random() < 0.8:  # the others at once, or while it composes
                wait_for_jobs(driver)
            end = time.monotonic() + draw.random() * 5
            while wants_kill and driver.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            if wants_kill and driver.poll() is None:
                jobs = jobs_of(driver)
                victim = "job" if jobs and draw.random() < 0.5 else "driver"
                os.kill(draw.choice(jobs) if victim == "job" else driver.pid, signal.SIGKILL)
                kills[victim] += 1
            status = driver.wait(300)
            now = finished(there)
            wrong += [f"{name} again" for name, at in before.items() if now.get(name) != at]
            before = now
        sweep = sweep_of(there)
        assert sweep is not None
        num_jobs += len(before)
        if len(before) != 6:
            wrong.append(f"{len(before)} of 6 finished in {sweep}")
        wrong += different(sweep, folder / "single")
    rows: Rows = {}
    rows[f"kill -9 of a {kind}'s driver or jobs"] = (
        not wrong,
        f"{kills['driver']} drivers and {kills['job']} jobs killed in {num_sweeps} sweeps, "
        f"{num_jobs} jobs finished, each once; {len(wrong)} differ {wrong[:3]}",
    )
    return rows


def different(sweep: Path, singles: Path) -> list[str]:
    """Jobs whose results are not those of a run of their own, to the last bit."""
    from harness.command import run_folder

    wrong = []
    for job in sorted(path.parent for path in sweep.glob("*/results.json")):
        words = [w for w in run_folder.load_words(job) if not w.startswith("output_dir=")]
        place = singles / str(abs(hash(tuple(words))))
        made = [*place.glob("*/*/results.json")]
        other = made[0].parent if made else single(words, place)
        for name in ("results.json", "metrics.csv"):
            if (job / name).read_bytes() != (other / name).read_bytes():
                wrong.append(f"{job / name}")
        assert json.loads((job / "results.json").read_text())
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="kind")
    parser.add_argument("--num", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a fork has no other threads, and would wait for them
    figures.show(
        "sweep",
        arguments.kinds or list(KINDS),
        lambda kind, to: storm(kind, to, arguments.num, arguments.seed),
        arguments.json,
    )


if __name__ == "__main__":
    main()
