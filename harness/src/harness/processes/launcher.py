"""What torchrun or Slurm tells each of the processes that it has started as one run. No torch."""

import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.errors import UserError


@dataclass(frozen=True)
class Launcher:
    """Who has started this process and others with it, and which of them this one is.

    Attributes:
        name: ``torchrun`` or ``srun``; ``python`` where this process was started alone, as in a
            batch script of Slurm, whatever that has asked for.
        rank: of this process; 0 if alone.
        local_rank: the same among those of this machine.
        num_processes: of the run.
        num_here: of the run, on this machine.
        num_nodes: machines of the run.
        job: of Slurm, with its task of an array and its step: the same when it is started again.
        agent: this machine's torchrun, which may start its processes again.
        num_restarts: how often Slurm has started this job before.
        task: this one's number in an array of Slurm's.
        num_torchruns: that srun has started with this process's; 1 where it has started none, and
            after a restart by torchrun, when some may be missing.
    """

    name: str = "python"
    rank: int = 0
    local_rank: int = 0
    num_processes: int = 1
    num_here: int = 1
    num_nodes: int = 1
    job: str | None = None
    agent: str | None = None
    num_restarts: int = 0
    task: str | None = None
    num_torchruns: int = 1

    @property
    def is_one_of_several(self) -> bool:
        """Whether this process has to find its way to others."""
        return self.num_processes > 1

    @cached_property
    def address(self) -> tuple[str, int]:
        """Where the process of rank 0 is met: a machine's name or address, and a port."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if self.name == "srun":
            job, step = _number("SLURM_JOB_ID"), _number("SLURM_STEP_ID")
            host = host or first_of(os.environ.get("SLURM_STEP_NODELIST", ""))
            # Two steps of a job, and two jobs on a machine, get ports of their own.
            port = port or str(15000 + (job * 10 + step) % 10000)
        if port and not port.isdigit():
            raise UserError(f"MASTER_PORT={port} must be a number.")
        return host or "localhost", int(port or 29500)


def launcher() -> Launcher:
    """Read the environment of this process."""
    env = os.environ
    job, restarts = _slurm_job(), _number("SLURM_RESTART_COUNT")
    num_tasks = _number("SLURM_STEP_NUM_TASKS", 1)
    task = env.get("SLURM_ARRAY_TASK_ID")
    if "TORCHELASTIC_RUN_ID" in env:
        return Launcher(
            name="torchrun",
            rank=_number("RANK"),
            local_rank=_number("LOCAL_RANK"),
            num_processes=_number("WORLD_SIZE", 1),
            num_here=_number("LOCAL_WORLD_SIZE", 1),
            num_nodes=_number("GROUP_WORLD_SIZE", 1),
            job=job,
            agent=_agent(),
            num_torchruns=1 if _number("TORCHELASTIC_RESTART_COUNT") else num_tasks,
            num_restarts=restarts,
            task=task,
        )
    if num_tasks > 1:
        tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(num_tasks)))
        return Launcher(
            name="srun",
            rank=_number("SLURM_PROCID"),
            local_rank=_number("SLURM_LOCALID"),
            num_processes=sum(tasks),
            num_here=tasks[min(_number("SLURM_NODEID"), len(tasks) - 1)],
            num_nodes=len(tasks),
            job=job,
            num_restarts=restarts,
            task=task,
        )
    return Launcher(job=job, num_restarts=restarts, task=task)


def tasks_per_node(text: str) -> list[int]:
    """The numbers in "2(x3),1", which Slurm writes for three nodes of two tasks and one of one."""
    tasks = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(number)] * int(times or 1)
    return tasks


def first_of(nodes: str) -> str:
    """The first name in "node[03-05,7],gpu1"."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]


def _slurm_job() -> str | None:
    """The job, with its task of an array and its step, but for the first."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        return None
    job = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}"
    step = env.get("SLURM_STEP_ID", "0")
    return f"slurm_{job}" + (f".{step}" if step.isdigit() and step != "0" else "")


def _agent() -> str | None:
    """The torchrun of this process, told from every other by its machine and its start."""
    pid = os.getppid()
    with suppress(OSError):
        while True:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if b"TORCHELASTIC_RUN_ID=" not in Path(f"/proc/{pid}/environ").read_bytes():
                return f"torchrun_{socket.gethostname()}_{pid}_{stat[19]}"
            pid = int(stat[1])  # this one is a script between the two
    return None


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
