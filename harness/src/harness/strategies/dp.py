"""dp: one process on one machine drives all its devices."""

from typing import Any

from pytorch_lightning.strategies import SingleDeviceStrategy

from .node_parallel import NodeParallelStrategy


class DataParallelStrategy(NodeParallelStrategy):
    """Splits each batch over the devices of one process.

    Gradients flow back through the copies of the parameters to the first device. Nothing is
    reduced between processes, because there is one. Arguments: see `NodeParallelStrategy`.
    """

    model_to_device = SingleDeviceStrategy.model_to_device
    reduce = SingleDeviceStrategy.reduce
    all_gather = SingleDeviceStrategy.all_gather
    barrier = SingleDeviceStrategy.barrier
    broadcast = SingleDeviceStrategy.broadcast

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The one process loads whole batches."""
        return {"num_replicas": 1, "rank": 0}
