"""Read what torchrun or Slurm says about the processes that it started. Imports no torch.

In: the environment. Out: a ``Launcher``, this process's rank, and Lightning's cluster environment.
Next: ``meeting``, where the processes of a launcher agree on a folder.
"""

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment


@dataclass(frozen=True)
class Launcher:
    """What started this process, and its place among the processes of the run."""

    name: str = "python"  # or torchrun, srun; python also where a batch script starts one process
    rank: int = 0
    local_rank: int = 0  # among the processes of this machine
    num_processes: int = 1
    num_here: int = 1  # processes on this machine
    num_nodes: int = 1
    job: str | None = None  # names the run across restarts
    is_again: bool = False  # whether this start may be a restart of the same run
    task: str | None = None  # number in an array of Slurm's
    num_torchruns: int = 1  # that srun started; unknown after a restart by torchrun

    @property
    def is_one_of_several(self) -> bool:
        """Return whether the run has other processes, which this one must reach."""
        return self.num_processes > 1

    @property
    def address(self) -> tuple[str, int]:
        """Return the name or address of the machine of rank 0, and a port there."""
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
    env, num_tasks = os.environ, number("SLURM_STEP_NUM_TASKS", 1)
    is_requeued, job = number("SLURM_RESTART_COUNT") > 0, _slurm_job()
    alone = Launcher(job=job, is_again=is_requeued, task=env.get("SLURM_ARRAY_TASK_ID"))
    if "TORCHELASTIC_RUN_ID" in env:
        run_id, was_restarted = _torchrun_id(), number("TORCHELASTIC_RESTART_COUNT") > 0
        return replace(
            alone,
            name="torchrun",
            rank=number("RANK"),
            local_rank=number("LOCAL_RANK"),
            num_processes=number("WORLD_SIZE", 1),
            num_here=number("LOCAL_WORLD_SIZE", 1),
            num_nodes=number("GROUP_WORLD_SIZE", 1),
            job=job or run_id,
            # A torchrun that loses a machine, or takes one in, counts no restart.
            is_again=is_requeued or was_restarted or (job is None and run_id is not None),
            num_torchruns=1 if was_restarted else num_tasks,
        )
    if num_tasks > 1:
        num_nodes = number("SLURM_STEP_NUM_NODES", 1)
        return replace(
            alone,
            name="srun",
            rank=number("SLURM_PROCID"),
            local_rank=number("SLURM_LOCALID"),
            num_processes=num_tasks,
            num_here=num_tasks // num_nodes,
            num_nodes=num_nodes,
        )
    return alone


def launcher_of(trainer: Any) -> Launcher:
    """Read the launcher, or NODE_RANK where ``trainer.num_nodes`` commands were typed by hand."""
    this, num_nodes = launcher(), trainer.num_nodes
    if this.name == "python" and num_nodes > 1:
        rank = int(os.environ["NODE_RANK"])
        return replace(this, rank=rank, num_processes=num_nodes, num_nodes=num_nodes)
    return this


def is_further_rank() -> bool:
    """Return whether this machine's first process started this one, and no launcher did."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and launcher().name == "python"


def global_rank() -> int:
    """Return the rank of this process in its run, from the environment; 0 if alone."""
    if (this := launcher()).is_one_of_several:
        return this.rank
    # Without a launcher, the first process of another machine has LOCAL_RANK=0 as well.
    return number("RANK", max(number("LOCAL_RANK"), number("NODE_RANK")))


def environments() -> "list[ClusterEnvironment]":
    """Describe the tasks of an srun to Lightning as torchrun would, and a batch script as a shell.

    Lightning's own class for Slurm ignores jobs that are named bash or interactive, and waits for
    others in a batch script that starts one process. Everything else Lightning finds itself.
    """
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    this = launcher()
    if this.name == "srun":
        host, port = this.address
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(this.rank)}
        os.environ |= {"LOCAL_RANK": str(this.local_rank), "WORLD_SIZE": str(this.num_processes)}
        os.environ |= {"GROUP_RANK": os.environ.get("SLURM_NODEID", "0")}
        return [TorchElasticEnvironment()]
    is_batch_script = "SLURM_JOB_ID" in os.environ and this.name == "python"
    return [LightningEnvironment()] if is_batch_script else []


def number(name: str, default: int = 0) -> int:
    """Return the number that a variable holds."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _slurm_job() -> str | None:
    """Name the job by its number and its task of an array."""
    job, task = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job is None or task is None:
        return job and f"slurm_{job}"
    return f"slurm_{os.environ.get('SLURM_ARRAY_JOB_ID', job)}_{task}"


def _torchrun_id() -> str | None:
    """Return the ``--rdzv-id`` that a person gave; ``--standalone`` makes up a UUID."""
    name = os.environ["TORCHELASTIC_RUN_ID"]
    is_made_up = name == "none" or re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    return None if is_made_up else "torchrun_" + re.sub(r"[^\w.-]", "_", name)
