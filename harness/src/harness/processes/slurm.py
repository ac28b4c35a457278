"""Ranks of processes inside of Slurm's jobs, told to Lightning.

Lightning's own class passes by jobs that are named bash or interactive, takes the job's settings
for those of a step, and waits for others in a batch script that starts one process.
"""

import os

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from harness.processes.launcher import launcher


class SlurmStep(ClusterEnvironment):
    """The tasks of one srun."""

    def __init__(self) -> None:
        self.known = launcher()

    @property
    def creates_processes_externally(self) -> bool:
        """Srun has started all."""
        return True

    @property
    def main_address(self) -> str:
        """The machine of rank 0."""
        return self.known.address[0]

    @property
    def main_port(self) -> int:
        """Where it is met."""
        return self.known.address[1]

    @staticmethod
    def detect() -> bool:
        """Whether srun has started this process with others."""
        return launcher().name == "srun"

    def world_size(self) -> int:
        """Processes of the run."""
        return self.known.num_processes

    def set_world_size(self, size: int) -> None:
        """Nothing to set."""

    def global_rank(self) -> int:
        """Of this process."""
        return self.known.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing to set."""

    def local_rank(self) -> int:
        """Of this process on its machine."""
        return self.known.local_rank

    def node_rank(self) -> int:
        """Of this machine."""
        return int(os.environ.get("SLURM_NODEID", "0"))


def environments() -> list[ClusterEnvironment]:
    """What Lightning is to take instead of what it would find; nothing outside of Slurm."""
    if SlurmStep.detect():
        return [SlurmStep()]
    is_alone = "SLURM_JOB_ID" in os.environ and launcher().name == "python"
    return [LightningEnvironment()] if is_alone else []
