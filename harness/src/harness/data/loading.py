"""What all loaders of a run have in common: their workers, and the processes that share them."""

import atexit
import os
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.utilities.seed import pl_worker_init_function

from harness.processes.leaving import follow_as_worker
from harness.processes.peers import close_inherited
from harness.processes.signals import end_workers, ignore_signals
from harness.upstream.worker_queues import end_where_nothing_is_sent

atexit.register(end_workers)  # after the imports above, and so before their own ends


def identity(batch: Any) -> Any:
    """Take a batch as the data set has collated it."""
    return batch


def start_worker(worker_id: int, then: Callable[[int], object] | None = None) -> None:
    """Prepare a data worker: it is seeded as by Lightning, and ends only with its process.

    Args:
        worker_id: its number.
        then: the ``worker_init_fn`` of the loader's owner.
    """
    pl_worker_init_function(worker_id)
    follow_as_worker()
    ignore_signals()
    close_inherited()
    end_where_nothing_is_sent(os._exit)
    if then is not None:
        then(worker_id)


def processes(trainer: pl.Trainer | None) -> tuple[int, int]:
    """How many processes share a batch, and the rank of this one."""
    kwargs = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None) or {}
    return kwargs.get("num_replicas", 1), kwargs.get("rank", 0)
