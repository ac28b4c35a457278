"""Tell Lightning of the processes in a job of Slurm's; elsewhere Lightning finds them itself.

Lightning's own class for Slurm ignores jobs that are named bash or interactive, reads the job's
variables where those of the step count, and waits for others in a batch script that starts one
process. In: the launcher. Out: a cluster environment. Next: the Trainer.
"""

import os

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from harness.processes.launcher import launcher


def environments() -> list[ClusterEnvironment]:
    """Describe the tasks of an srun as torchrun would, and a batch script as a shell."""
    found = launcher()
    if found.name == "srun":
        host, port = found.address
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(found.rank)}
        os.environ |= {"LOCAL_RANK": str(found.local_rank), "WORLD_SIZE": str(found.num_processes)}
        os.environ |= {"GROUP_RANK": os.environ.get("SLURM_NODEID", "0")}
        return [TorchElasticEnvironment()]
    is_alone_in_job = "SLURM_JOB_ID" in os.environ and found.name == "python"
    return [LightningEnvironment()] if is_alone_in_job else []
