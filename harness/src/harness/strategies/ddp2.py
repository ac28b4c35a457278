"""ddp2: one process per node drives all devices of the node."""

from .ddp import DDPStrategy
from .dp import NodeParallelStrategy


class DDP2Strategy(NodeParallelStrategy, DDPStrategy):
    """Split the node's batch over its devices, and average gradients between nodes.

    The step sees the whole batch of its node, so a loss may compare all pairs of its samples.
    Arguments: see `NodeParallelStrategy`; others go to DistributedDataParallel.
    """

    @property
    def num_processes(self) -> int:
        """Return the processes per node. Ranks, world size and samplers are derived from it."""
        return 1
