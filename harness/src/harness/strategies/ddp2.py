"""ddp2: one process per node drives all devices of the node."""

import os

from lightning_fabric.plugins.environments.lightning import LightningEnvironment

from harness.errors import UserError
from harness.exact.unfrozen import DDPStrategy

from .launchable import check_addresses
from .node_parallel import NodeParallelStrategy

_START = (
    "Start one process per node: torchrun --nnodes={n} --nproc-per-node=1, "
    "srun --nodes={n} --ntasks-per-node=1,\n"
    "or python with MASTER_ADDR, MASTER_PORT and NODE_RANK set on each node."
)


class DDP2Strategy(NodeParallelStrategy, DDPStrategy):
    """Splits the node's batch over its devices, and averages gradients between nodes.

    The step sees the whole batch of the node, which is what a loss over pairs of samples wants.
    Arguments: see `NodeParallelStrategy`; others go to DistributedDataParallel.
    """

    strategy_name = "ddp2"

    @property
    def num_processes(self) -> int:
        """Processes per node; ranks, world size, launcher and sampler follow from it."""
        return 1

    def set_world_ranks(self) -> None:
        """Refuse several processes on a node, and a launch that would wait forever."""
        NodeParallelStrategy.set_world_ranks(self)
        environment = self.cluster_environment
        assert environment is not None
        if isinstance(environment, LightningEnvironment) and self.num_nodes > 1:
            check_addresses(self.num_nodes)
        start = _START.format(n=self.num_nodes)
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun
        if on_node > 1 or environment.local_rank() > 0:
            raise UserError(
                f"strategy=ddp2 drives all devices of a node from one process, but "
                f"{max(on_node, environment.local_rank() + 1)} were started on this node.\n{start}"
            )
        try:
            environment.validate_settings(num_devices=1, num_nodes=self.num_nodes)
        except ValueError as error:
            raise UserError(
                f"strategy=ddp2 needs as many processes as trainer.num_nodes={self.num_nodes}, "
                f"one on each node; the environment says otherwise.\n{start}"
            ) from error
        DDPStrategy.set_world_ranks(self)
