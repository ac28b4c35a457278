"""Who has started this process: a person, a launcher, a sweep, or the first process of a run.

A run tells its further processes, and a sweep its jobs, by one variable each. Whoever else inherits
them, such as a program that a callback starts, is none of them and forgets what it has inherited.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.processes.launcher import launcher

# "<pid of the run's first process>:<the run's folder>", for the processes that Lightning starts.
RANK_OF = "HARNESS_RANK_OF"
# "<pid>:<the folder of a job>"; the job takes it out of its environment when it starts.
JOB = "HARNESS_JOB"
# What launchers tell the processes of one run.
OF_LAUNCHERS = re.compile(
    "RANK|(LOCAL|NODE|GROUP)_RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    "|ROLE_.*|TORCHELASTIC_.*|SLURM_.*|HARNESS_.*"
)


def follow_launcher() -> None:
    """Let this process end when the one ends that has started it as a part of a run.

    To be called first of all: what follows takes seconds, in which that one may end. Whoever a
    person has started follows nobody, and Slurm ends the processes of its jobs itself.
    """
    if sys.platform != "linux":
        return
    told = {name: int(os.environ.get(name, "").partition(":")[0] or 0) for name in (RANK_OF, JOB)}
    pid = told[RANK_OF] if is_rank_of_a_run() else told[JOB]
    if not pid and not told[RANK_OF] and "TORCHELASTIC_RUN_ID" in os.environ:
        pid = os.getppid()
    if not pid or (pid != os.getppid() and is_alive(pid)):
        return  # a program that has inherited the variables
    # What a notebook or a script of one's own does without:
    from harness.processes import leaving

    leaving.follow(pid)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has not ended, as far as one can look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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
    inherited = os.environ | {JOB: f"{os.getpid()}:{run_dir}"}
    return {key: value for key, value in inherited.items() if key != "HYDRA_FULL_ERROR"}


def job_that_this_is() -> Path | None:
    """The folder of the job that this process was started for."""
    _, _, run_dir = os.environ.pop(JOB, "").partition(":")
    return Path(run_dir) if run_dir else None


def global_rank() -> int:
    """This process's place among those of the run, from what its launcher has set; 0 if alone."""
    if (known := launcher()).is_one_of_several:
        return known.rank
    if os.environ.get("RANK", "").isdigit():
        return int(os.environ["RANK"])
    # Without a launcher, the first process of another node has LOCAL_RANK=0 as well.
    numbers = [os.environ.get(name, "") for name in ("LOCAL_RANK", "NODE_RANK")]
    return max(int(number) if number.isdigit() else 0 for number in numbers)
