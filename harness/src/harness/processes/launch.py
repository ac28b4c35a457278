"""Tell the ranks of a run and the jobs of a sweep which folder is theirs, by one variable.

In: the environment. Out: the folder that this process was started for. Next: ``command.main``.
Other programs that inherit the variable, as from a callback, forget it. Imports no torch.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.processes.launcher import launcher, number

# "<pid of the process that starts others>:<rank or job>:<their folder>"
PARENT = "HARNESS_PARENT"
# Variables by which launchers address the processes of one run.
OF_LAUNCHERS = re.compile(
    "RANK|(LOCAL|NODE|GROUP)_RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    "|ROLE_.*|TORCHELASTIC_.*|SLURM_.*|HARNESS_.*"
)


def follow_parent() -> None:
    """Let this process end when the run, sweep or torchrun that started it ends.

    To be called first of all: imports take seconds, in which the parent may end. What a person
    started follows nobody, and Slurm ends the processes of its jobs itself.
    """
    if sys.platform != "linux":
        return
    pid, role, _ = _parent()
    if role == "rank" and not is_further_rank():
        return  # a program that inherited the variable
    if not role and "TORCHELASTIC_RUN_ID" in os.environ:
        pid = os.getppid()
    if pid and (pid == os.getppid() or not _is_alive(pid)):
        from harness.processes import leaving  # not needed in a notebook

        leaving.follow(pid)


def is_further_rank() -> bool:
    """Whether the run's first process on this machine started this one, and no launcher did."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and launcher().name == "python"


def folder_of_run() -> Path | None:
    """Return the folder of the run of which this process is a further rank.

    Another program that has inherited the run's variables forgets them here.
    """
    pid, role, run_dir = _parent()
    if role != "rank":
        return None
    if is_further_rank() and pid == os.getppid():
        return Path(run_dir)
    for name in filter(OF_LAUNCHERS.fullmatch, list(os.environ)):
        del os.environ[name]
    return None


def folder_of_job() -> Path | None:
    """Return the folder of the job that this process was started for, and forget it."""
    _, role, run_dir = _parent()
    if role != "job":
        return None
    del os.environ[PARENT]
    return Path(run_dir)


def global_rank() -> int:
    """Return the rank of this process in its run, from the environment; 0 if alone."""
    if (found := launcher()).is_one_of_several:
        return found.rank
    if os.environ.get("RANK", "").isdigit():
        return number("RANK")
    # Without a launcher, the first process of another machine has LOCAL_RANK=0 as well.
    return max(number("LOCAL_RANK"), number("NODE_RANK"))


@contextmanager
def environment_of_ranks(run_dir: Path) -> Iterator[None]:
    """Tell the processes that Lightning starts in the block which run they belong to."""
    os.environ[PARENT] = f"{os.getpid()}:rank:{run_dir}"
    try:
        yield
    finally:
        del os.environ[PARENT]


def job_environment(run_dir: Path) -> dict[str, str]:
    """Return the environment of a process that computes one job."""
    inherited = os.environ | {PARENT: f"{os.getpid()}:job:{run_dir}"}
    return {key: value for key, value in inherited.items() if key != "HYDRA_FULL_ERROR"}


def _parent() -> tuple[int, str, str]:
    pid, _, rest = os.environ.get(PARENT, "").partition(":")
    role, _, folder = rest.partition(":")
    return int(pid or 0), role, folder


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
