"""dp: one process on one machine drives all its devices."""

from typing import Any

from torch import Tensor

from harness.errors import UserError

from .launchable import check_one_node
from .node_parallel import NodeParallelStrategy


class DataParallelStrategy(NodeParallelStrategy):
    """Splits each batch over the devices of one process.

    Gradients flow back through the copies of the parameters to the first device. Nothing is
    reduced between processes, because there is one. Arguments: see `NodeParallelStrategy`.
    """

    strategy_name = "dp"

    @property
    def num_nodes(self) -> int:
        """Always 1; the Trainer sets it from trainer.num_nodes."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        check_one_node(num_nodes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The one process loads whole batches."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        """Refuse to be one of several processes: each would train alone."""
        super().set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        if environment.creates_processes_externally and environment.world_size() > 1:
            raise UserError(
                f"strategy=dp runs in one process, but {environment.world_size()} were started.\n"
                "Start it with python (torchrun --nproc-per-node=1, srun --ntasks=1), "
                "or use strategy=ddp."
            )

    def model_to_device(self) -> None:
        """Move the module to the first device; replicas follow at each forward."""
        assert self.model is not None
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the value, which already is that of the whole batch."""
        return tensor

    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the value: there is one process."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Return at once: there is one process."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object: there is one process."""
        return obj
