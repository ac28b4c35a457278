"""A real Slurm for longer: signals, preemption, limits, dead nodes, chains; for ``__main__``."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests_harness.cluster.long_hosts import BAR
from tests_harness.cluster.runs import (
    NUM_STEPS,
    WORDS,
    alone,
    config,
    distance,
    finished,
    num_steps,
    run_folders,
    where,
)
from tests_harness.cluster.slurm import Slurm
from tests_harness.cluster.test_slurm import ON_BOTH, TRACE, array_script, shown_script, words
from tests_harness.figures import Rows

NUM_EPOCHS = 5
LONG = f"trainer.max_epochs={NUM_EPOCHS}"
LIMIT_SECONDS = 900.0


def slurm(folder: Path) -> Rows:
    """Each case in a folder of its own, on one cluster."""
    cluster = Slurm(folder)
    rows: Rows = {}
    for name, case in CASES.items():
        there, began = folder / case.__name__, time.monotonic()
        there.mkdir()
        try:
            is_met, figures = case(cluster, there)
        except (AssertionError, ValueError) as error:
            is_met, figures = False, " ".join(str(error).split())[-400:]
        rows[f"Slurm: {name}"] = is_met, f"{figures}, {time.monotonic() - began:.0f} s"
        cluster.clear()
    cluster.close()
    return rows


def _reference(cluster: Slurm, folder: Path, *more: str) -> Path:
    return alone(cluster.network, folder, *more)


def ddp(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """One task on each node."""
    return _srun(cluster, folder, "strategy=ddp", "trainer.devices=1")


def ddp2(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """One task on each node, of two logical devices."""
    return _srun(cluster, folder, "strategy=ddp2", "trainer.devices=2")


def _srun(cluster: Slurm, folder: Path, *more: str) -> tuple[bool, str]:
    line = words(folder, *more, "trainer.num_nodes=2")
    started = cluster.srun(line, "--nodes=2", "--ntasks-per-node=1")
    status = started.wait(LIMIT_SECONDS)
    (run_dir,) = run_folders(folder)
    found = distance(run_dir, _reference(cluster, folder))
    return status == 0 and found <= BAR, f"status {status}, weights {found:.1e} from one process"


def _job(cluster: Slurm, folder: Path, *options: str, more: Sequence[str] = ()) -> str:
    run = words(folder, *ON_BOTH, LONG, *more, seconds_per_batch=1.0)
    return cluster.submit(shown_script(folder), *run, options=options)


def _ended(cluster: Slurm, folder: Path, job: str, num_lost: int = 0) -> tuple[bool, str]:
    """How a job of one run ends: the same weights as one process, and how many steps twice."""
    state = cluster.wait(job, LIMIT_SECONDS)
    (run_dir,) = run_folders(folder)
    found = distance(run_dir, _reference(cluster, folder, LONG))
    restarts = int(cluster.about(job)["Restarts"])
    twice = num_steps(folder) - NUM_EPOCHS * NUM_STEPS
    return (
        state == "COMPLETED" and found <= BAR and restarts > 0 and twice <= num_lost,
        f"{state}, {restarts} restarts, {twice} steps twice, weights {found:.1e} from one process",
    )


def preempted(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """A job of a higher partition takes both nodes."""
    job = _job(cluster, folder, "--exclusive")
    cluster.wait_until(job, lambda: num_steps(folder) >= 10)
    cluster.submit("sleep 10", options=["-p", "high", "--nodes=2", "--exclusive"])
    return _ended(cluster, folder, job)


def limited(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """The time of the job ends in the middle of the training."""
    job = _job(cluster, folder, "--time=2", "--signal=USR1@60", more=["trainer.max_epochs=8"])
    state = cluster.wait(job, LIMIT_SECONDS)
    (run_dir,) = run_folders(folder)
    found = distance(run_dir, _reference(cluster, folder, "trainer.max_epochs=8"))
    restarts, twice = int(cluster.about(job)["Restarts"]), num_steps(folder) - 8 * NUM_STEPS
    return (
        state == "COMPLETED" and found <= BAR and restarts > 0 and twice <= 0,
        f"{state}, {restarts} restarts, {twice} steps twice, weights {found:.1e} from one process",
    )


def chained(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """Four starts, three of which end by a signal."""
    job = _job(cluster, folder)
    for number in (1, 2, 3):
        cluster.wait_until(job, lambda number=number: num_steps(folder) >= 15 * number)
        cluster.ask("scancel", "--signal=USR1", job)
        restarts = str(number)
        cluster.wait_until(job, lambda: cluster.about(job).get("Restarts") == restarts)  # noqa: B023
    return _ended(cluster, folder, job)


def node_dead(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """kill -9 of all that lives on the second node, which then comes back."""
    job = _job(cluster, folder, more=["checkpoint.every_n_steps=5"])
    cluster.wait_until(job, lambda: num_steps(folder) >= 12)
    cluster.network.hosts[1].kill()
    # Slurm misses it after SlurmdTimeout, and takes it back as a person brings it back.
    cluster.wait_until(job, lambda: cluster.about(job).get("Restarts") == "1")
    cluster.start_node(2)
    cluster.ask("scontrol", "update", "NodeName=host2", "State=RESUME")
    return _ended(cluster, folder, job, num_lost=6)


def array(cluster: Slurm, folder: Path) -> tuple[bool, str]:
    """Four seeds, each of them signalled, and put back in the queue by the script."""
    run = [*WORDS, *where(folder), *TRACE.split(), LONG]
    job = cluster.submit(array_script(folder), *run, options=["--array=1-4"])
    tasks = {number: folder / f"task_{number}" for number in range(1, 5)}
    for number, task in tasks.items():
        cluster.wait_until(f"{job}_{number}", lambda task=task: num_steps(task) >= 8)
        cluster.ask("scancel", "--signal=USR1", f"{job}_{number}")
    states = [cluster.wait(f"{job}_{number}", LIMIT_SECONDS) for number in tasks]
    runs = {config(run_dir).seed: run_dir for run_dir in finished(folder)}
    worst = max(
        distance(run_dir, _reference(cluster, folder / f"of_{seed}", LONG, f"seed={seed}"))
        for seed, run_dir in runs.items()
    )
    twice = sum(num_steps(task) - NUM_EPOCHS * NUM_STEPS for task in tasks.values())
    restarts = [cluster.about(f"{job}_{number}")["Restarts"] for number in tasks]
    return (
        set(states) == {"COMPLETED"} and len(runs) == len(run_folders(folder)) == 4
        and worst <= BAR and twice <= 0 and set(restarts) == {"1"},
        f"{states}, {len(run_folders(folder))} folders, {twice} steps twice, restarts {restarts}, "
        f"weights {worst:.1e} from one process",
    )  # fmt: skip


CASES: dict[str, Callable[[Slurm, Path], tuple[bool, str]]] = {
    "srun ddp": ddp,
    "srun ddp2": ddp2,
    "array of 4 seeds, each signalled and requeued": array,
    "preemption by a higher partition": preempted,
    "USR1 before the limit": limited,
    "a node dies": node_dead,
    "4 chained starts": chained,
}
