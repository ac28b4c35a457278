"""Read the environment variables of torchrun and Slurm. This module imports no torch.

In: the environment. Out: a ``Launcher``, this process's rank, and Lightning's cluster environment.
Next: ``rendezvous``, where the processes of a launcher agree on a folder.
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
    """The program that started this process, and this process's rank in the run."""

    name: str = "python"  # or torchrun or srun; a batch script that starts one process is python
    rank: int = 0
    local_rank: int = 0  # rank on this machine
    num_processes: int = 1
    num_here: int = 1  # processes on this machine
    num_nodes: int = 1
    job: str | None = None  # the same name for all restarts of the run
    may_be_restart: bool = False  # whether this start may be a restart of the same run
    task: str | None = None  # index in a Slurm job array
    num_torchruns: int = 1  # torchruns that srun started; unknown after a restart by torchrun

    @property
    def has_several_processes(self) -> bool:
        """Return whether the launcher started several processes, which must reach each other."""
        return self.num_processes > 1

    @property
    def address(self) -> tuple[str, int]:
        """Return the host name or address of rank 0, and a port there."""
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if self.name == "srun":
            # "node[03-05,7],gpu1" begins with node03.
            nodes = os.environ.get("SLURM_STEP_NODELIST", "")
            host = host or re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]
            # Two steps of a job, and two jobs on a machine, get different ports.
            job, step = number("SLURM_JOB_ID"), number("SLURM_STEP_ID")
            port = port or str(15000 + (job * 10 + step) % 10000)
        if port and not port.isdigit():
            raise UserError(f"MASTER_PORT={port} is not a number. Set MASTER_PORT=<a free port>.")
        return host or "localhost", int(port or 29500)


def launcher() -> Launcher:
    """Return the ``Launcher`` that this process's environment describes."""
    env, num_tasks = os.environ, number("SLURM_STEP_NUM_TASKS", 1)
    is_requeued, job = number("SLURM_RESTART_COUNT") > 0, _slurm_job()
    alone = Launcher(job=job, may_be_restart=is_requeued, task=env.get("SLURM_ARRAY_TASK_ID"))
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
            # torchrun does not count a restart when it loses or gains a machine.
            may_be_restart=is_requeued or was_restarted or (job is None and run_id is not None),
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
    """Return the launcher; if a user starts each node's command by hand, NODE_RANK is the rank."""
    this, num_nodes = launcher(), trainer.num_nodes
    if this.name == "python" and num_nodes > 1:
        rank = int(os.environ["NODE_RANK"])
        return replace(this, rank=rank, num_processes=num_nodes, num_nodes=num_nodes)
    return this


def is_child_rank() -> bool:
    """Return whether local rank 0, and no launcher, started this process as another rank."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and launcher().name == "python"


def global_rank() -> int:
    """Return the rank of this process in its run, from the environment; 0 in a single process."""
    if (this := launcher()).has_several_processes:
        return this.rank
    # Without a launcher, local rank 0 of another machine has only NODE_RANK set.
    return number("RANK", max(number("LOCAL_RANK"), number("NODE_RANK")))


def environments() -> "list[ClusterEnvironment]":
    """Return Lightning's cluster environment for a process under Slurm, else an empty list.

    A task of srun gets the variables and the class of torchrun. A batch script that starts one
    process gets the class for commands in a shell. Lightning's own class for Slurm ignores jobs
    named bash or interactive, and in a batch script it waits for more processes than there are.
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
    """Return the number in an environment variable, or ``default`` if it holds no number."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _slurm_job() -> str | None:
    """Return a name of the Slurm job: its number, and its index in a job array."""
    job, task = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if job is None or task is None:
        return job and f"slurm_{job}"
    return f"slurm_{os.environ.get('SLURM_ARRAY_JOB_ID', job)}_{task}"


def _torchrun_id() -> str | None:
    """Return the user's ``--rdzv-id``, or ``None``; ``--standalone`` generates a UUID instead."""
    name = os.environ["TORCHELASTIC_RUN_ID"]
    is_uuid = re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
    return None if name == "none" or is_uuid else "torchrun_" + re.sub(r"[^\w.-]", "_", name)
