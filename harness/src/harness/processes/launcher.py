"""Read what torchrun or Slurm says about the processes that it started. Imports no torch.

In: the environment. Out: a ``Launcher``. Next: ``meeting``, and ``slurm`` for Lightning.
"""

import os
import re
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import UserError


@dataclass(frozen=True)
class Launcher:
    """The launcher of this process, and the place of this process among those of the run.

    Attributes:
        name: ``torchrun`` or ``srun``; ``python`` for a process that was started alone, as in a
            batch script of Slurm, whatever the script asked for.
        rank: among all processes of the run; 0 if alone.
        local_rank: among those of this machine.
        num_processes: of the run.
        num_here: of the run, on this machine.
        num_nodes: machines of the run.
        job: names the run across restarts: Slurm's job with array task and step, or the
            ``--rdzv-id`` that torchrun was given.
        is_again: whether this start may be a restart of the same run.
        task: number in an array of Slurm's.
        num_torchruns: torchruns that srun started; 1 where it started none, and after a restart
            by torchrun, when some may be missing.
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

    @property
    def address(self) -> tuple[str, int]:
        """Name or address of the machine of rank 0, and a port there."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if self.name == "srun":
            # The first name in "node[03-05,7],gpu1".
            nodes = os.environ.get("SLURM_STEP_NODELIST", "")
            host = host or re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]
            # Two steps of a job, and two jobs on a machine, get ports of their own.
            job, step = number("SLURM_JOB_ID"), number("SLURM_STEP_ID")
            port = port or str(15000 + (job * 10 + step) % 10000)
        if port and not port.isdigit():
            raise UserError(f"MASTER_PORT={port} must be a number.")
        return host or "localhost", int(port or 29500)


def launcher() -> Launcher:
    """Read the environment of this process."""
    env = os.environ
    job, task = _slurm_job(), env.get("SLURM_ARRAY_TASK_ID")
    is_again = number("SLURM_RESTART_COUNT") > 0
    num_tasks, num_nodes = number("SLURM_STEP_NUM_TASKS", 1), number("SLURM_STEP_NUM_NODES", 1)
    if "TORCHELASTIC_RUN_ID" in env:
        run_id = _torchrun_id() if job is None else None
        was_restarted = number("TORCHELASTIC_RESTART_COUNT") > 0
        return Launcher(
            name="torchrun",
            rank=number("RANK"),
            local_rank=number("LOCAL_RANK"),
            num_processes=number("WORLD_SIZE", 1),
            num_here=number("LOCAL_WORLD_SIZE", 1),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
            job=job or run_id,
            num_torchruns=1 if was_restarted else num_tasks,
            # A torchrun that loses a machine, or takes one in, counts no restart.
            is_again=is_again or was_restarted or run_id is not None,
            task=task,
        )
    if num_tasks > 1:
        return Launcher(
            name="srun",
            rank=number("SLURM_PROCID"),
            local_rank=number("SLURM_LOCALID"),
            num_processes=num_tasks,
            num_here=num_tasks // num_nodes,
            num_nodes=num_nodes,
            job=job,
            is_again=is_again,
            task=task,
        )
    return Launcher(job=job, is_again=is_again, task=task)


def launcher_of(trainer: Any) -> Launcher:
    """Read the launcher, or NODE_RANK where a person started the command on each machine.

    Args:
        trainer: settings of the Trainer, which have the number of machines.
    """
    found, num_nodes = launcher(), trainer.num_nodes
    if found.name == "python" and num_nodes > 1:
        rank = int(os.environ["NODE_RANK"])
        return replace(found, rank=rank, num_processes=num_nodes, num_nodes=num_nodes)
    return found


def _slurm_job() -> str | None:
    """Name the job by its number, its task of an array, and its step unless that is the first."""
    env = os.environ
    if "SLURM_JOB_ID" not in env:
        return None
    job = env["SLURM_JOB_ID"]
    if "SLURM_ARRAY_TASK_ID" in env:
        job = f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}"
    step = number("SLURM_STEP_ID")
    return f"slurm_{job}.{step}" if step else f"slurm_{job}"


def _torchrun_id() -> str | None:
    """Return the ``--rdzv-id`` that a person gave; ``--standalone`` makes up a UUID."""
    name = os.environ["TORCHELASTIC_RUN_ID"]
    is_made_up = name == "none" or re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    return None if is_made_up else "torchrun_" + re.sub(r"[^\w.-]", "_", name)


def number(name: str, default: int = 0) -> int:
    """Return the number that a variable holds."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
