"""What torchrun or Slurm tells each of the processes that it has started as one run. No torch."""

import os
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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
        job: names what is the same when it is started again: Slurm's job, with its task of an array
            and its step, or the ``--rdzv-id`` that a torchrun was given.
        is_again: whether this start may be another one of the same run.
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
    is_again: bool = False
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
    job, is_again = _slurm_job(), _number("SLURM_RESTART_COUNT") > 0
    num_tasks = _number("SLURM_STEP_NUM_TASKS", 1)
    task = env.get("SLURM_ARRAY_TASK_ID")
    if "TORCHELASTIC_RUN_ID" in env:
        # A torchrun that loses a machine, or takes one in, counts no restart.
        own = _torchrun_job() if job is None else None
        was_restarted = _number("TORCHELASTIC_RESTART_COUNT") > 0
        return Launcher(
            name="torchrun",
            rank=_number("RANK"),
            local_rank=_number("LOCAL_RANK"),
            num_processes=_number("WORLD_SIZE", 1),
            num_here=_number("LOCAL_WORLD_SIZE", 1),
            num_nodes=_number("GROUP_WORLD_SIZE", 1),
            job=job or own,
            num_torchruns=1 if was_restarted else num_tasks,
            is_again=is_again or was_restarted or own is not None,
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
            is_again=is_again,
            task=task,
        )
    return Launcher(job=job, is_again=is_again, task=task)


def known_of(trainer: Any) -> Launcher:
    """Who has started this process; where a person has typed it on several machines, these.

    Args:
        trainer: settings of the Trainer, which have the number of machines.
    """
    known, num_nodes = launcher(), trainer.num_nodes
    if known.name == "python" and num_nodes > 1:
        rank = int(os.environ["NODE_RANK"])
        return replace(known, rank=rank, num_processes=num_nodes, num_nodes=num_nodes)
    return known


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


def _torchrun_job() -> str | None:
    """The ``--rdzv-id`` that a person has given; ``--standalone`` makes one up."""
    name = os.environ["TORCHELASTIC_RUN_ID"]
    is_given = name != "none" and not re.fullmatch(
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name
    )
    return "torchrun_" + re.sub(r"[^\w.-]", "_", name) if is_given else None


def _number(name: str, default: int = 0) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
