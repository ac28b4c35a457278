"""Who has started this process: a person, a launcher, a sweep, or the first process of a run.

A run tells its further processes, and a sweep its jobs, by one variable each. Whoever else inherits
them, such as a program that a callback starts, is none of them and forgets what it has inherited.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# "<pid of the run's first process>:<the run's folder>", for the processes that Lightning starts.
RANK_OF = "HARNESS_RANK_OF"
# The folder of a job; the job takes it out of its environment when it starts.
JOB = "HARNESS_JOB"
# What launchers tell the processes of one run.
OF_LAUNCHERS = re.compile(
    "RANK|(LOCAL|NODE|GROUP)_RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    "|ROLE_.*|TORCHELASTIC_.*|SLURM_.*|HARNESS_.*"
)


def is_rank_of_a_run() -> bool:
    """Whether a run's first process has started this one, and not torchrun or Slurm."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ


def run_that_this_is_a_rank_of() -> Path | None:
    """The folder of the run whose first process has started this one as another rank of it.

    Another program that has inherited the run's variables forgets them here.
    """
    pid, _, run_dir = os.environ.get(RANK_OF, "").partition(":")
    if not pid:
        return None
    if is_rank_of_a_run() and int(pid) == os.getppid():
        return Path(run_dir)
    for name in filter(OF_LAUNCHERS.fullmatch, list(os.environ)):
        del os.environ[name]
    return None


@contextmanager
def telling_ranks(run_dir: Path) -> Iterator[None]:
    """Let the processes that Lightning starts from this one know which run they belong to."""
    os.environ[RANK_OF] = f"{os.getpid()}:{run_dir}"
    try:
        yield
    finally:
        del os.environ[RANK_OF]


def job_environment(run_dir: Path) -> dict[str, str]:
    """The environment of a process that computes one job."""
    inherited = os.environ | {JOB: str(run_dir)}
    return {key: value for key, value in inherited.items() if key != "HYDRA_FULL_ERROR"}


def job_that_this_is() -> Path | None:
    """The folder of the job that this process was started for."""
    run_dir = os.environ.pop(JOB, None)
    return None if run_dir is None else Path(run_dir)


def global_rank() -> int:
    """This process's place among those of the run, from what its launcher has set; 0 if alone."""
    for name in ("RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    # Without a launcher, the first process of another node has LOCAL_RANK=0 as well.
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "NODE_RANK")]
    return max(int(number) if number.isdigit() else 0 for number in numbers)


def launcher_of_several() -> tuple[str, int]:
    """The launcher that has started this process, and how many it has started; 1 if none did.

    A batch script of Slurm is one process, whatever it has asked for.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ["WORLD_SIZE"])
    if "SLURM_JOB_ID" in os.environ:
        in_step = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        return "srun", max(in_step, int(os.environ.get("SLURM_PROCID", "0")) + 1)
    return "python", 1


def num_processes_here() -> int:
    """Processes of the run that a launcher has started on this machine; 1 if none did."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if "SLURM_JOB_ID" in os.environ:
        # Of the step that srun has started, else of the job: "2(x3),1" is three times 2, then 1.
        of_job = os.environ.get("SLURM_TASKS_PER_NODE", "1")
        tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or of_job
        return max(int(count.partition("(")[0]) for count in tasks.split(","))
    return 1
