"""Find the run, sweep or torchrun that started this process, and end with it.

In: the environment variable ``HARNESS_PARENT``. Out: the folder of this process's run or job. Next:
``command.main``. A program may inherit the variable and be neither a rank nor a job: the functions
then remove the variable. This module imports no torch.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.distributed.launcher import is_child_rank

PARENT = "HARNESS_PARENT"  # "<pid of the parent>:<rank or job>:<folder of this process>"
OF_SLURM = "SLURM_(?!CONF$|JWT$).*"  # variables of one Slurm job, and not of the cluster
# Variables that launchers set in the processes of one run.
OF_LAUNCHERS = re.compile(
    "RANK|(LOCAL|NODE|GROUP)_RANK|(LOCAL_|GROUP_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
    f"|ROLE_.*|TORCHELASTIC_.*|{OF_SLURM}|HARNESS_.*"
)


def follow_parent() -> None:
    """Let this process end when the run, sweep or torchrun that started it ends.

    Call this first: the other imports take seconds, in which the parent may end. A command that a
    user typed follows no parent. Slurm ends the processes of its jobs by itself.
    """
    pid, role, _ = _parent()
    if sys.platform != "linux" or (role == "rank" and not is_child_rank()):
        return  # in the second case, this program only inherited the variable
    if not role and "TORCHELASTIC_RUN_ID" in os.environ:
        pid = os.getppid()
    if pid and (pid == os.getppid() or not _is_alive(pid)):
        from harness.distributed import shutdown  # not needed in a notebook

        shutdown.end_with_parent(pid)


def folder_of_run() -> Path | None:
    """Return the folder of the run if another rank started this process, and ``None`` otherwise.

    A program that only inherited a run's variables loses them, so that it starts as a new run.
    """
    pid, role, run_dir = _parent()
    if role != "rank":
        return None
    if is_child_rank() and pid == os.getppid():
        return Path(run_dir)
    for name in filter(OF_LAUNCHERS.fullmatch, list(os.environ)):
        del os.environ[name]
    return None


def folder_of_job() -> Path | None:
    """Return the folder of the sweep's job and remove the variable; ``None`` outside of a job."""
    _, role, run_dir = _parent()
    if role != "job":
        return None
    del os.environ[PARENT]
    return Path(run_dir)


@contextmanager
def environment_of_ranks(run_dir: Path) -> Iterator[None]:
    """Pass the run's folder to the ranks that are started within the block."""
    os.environ[PARENT] = f"{os.getpid()}:rank:{run_dir}"
    try:
        yield
    finally:
        del os.environ[PARENT]


def job_environment(run_dir: Path) -> dict[str, str]:
    """Return the environment for the process of one job of a sweep."""
    inherited = os.environ | {PARENT: f"{os.getpid()}:job:{run_dir}"}
    return {key: value for key, value in inherited.items() if key != "HYDRA_FULL_ERROR"}


def _parent() -> tuple[int, str, str]:
    pid, role, folder = os.environ.get(PARENT, "0::").split(":", 2)
    return int(pid), role, folder


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
