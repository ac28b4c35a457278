"""Stand-ins for the process group and the trainer, which copies of a module compute with.

In: the run's trainer. Out: objects with its numbers that reach no real process. Each copy's step
runs in a thread, and a collective operation is a meeting of the threads. Next: `copies.py`.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers.logger import DummyLogger
from torch import Tensor


class UnequalError(Exception):
    """Two copies meet in different operations: processes would wait for each other for ever."""


class UnequalShapesError(Exception):
    """Copies gather tensors of different shapes."""


class Group:
    """Threads in place of processes, which wait for each other where processes would.

    Without ``gathers`` they stand for batches that are accumulated: no step of these sees another.
    """

    def __init__(self, size: int, gathers: bool = True) -> None:
        self.size, self.num_processes = size, size if gathers else 1
        self.thread = threading.local()  # its rank
        self.asked: list[tuple[str, Any]] = [("", None)] * size
        self.values: list[Any] = []  # of the last meeting
        self.barrier = threading.Barrier(size, self._compare)

    def run(self, function: Callable[[int], None]) -> None:
        """Call ``function(rank)`` in each thread; raise the first error of any."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._run, function, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception())]
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in own or errors:
            raise error

    def _run(self, function: Callable[[int], None], rank: int) -> None:
        self.thread.rank = rank
        try:
            function(rank)
            self.meet("the end of its step")
        except BaseException:
            self.barrier.abort()
            raise

    def meet(self, what: str, value: Any = None) -> list[Any]:
        """Wait for all threads; return the values of all. ``_compare`` raises in the last one."""
        self.asked[self.thread.rank] = what, value
        self.barrier.wait()
        return self.values  # the list of this meeting, whoever is at the next one

    def _compare(self) -> None:
        names = list(dict.fromkeys(what for what, _ in self.asked))
        if len(names) > 1:
            raise UnequalError(", another to ".join(names))
        self.values = [value for _, value in self.asked]

    def gather(self, tensor: Any = None) -> list[Any]:
        """Return the tensors of all copies, which keep their graphs."""
        values = self.meet("a collective operation", tensor)
        if len({getattr(one, "shape", None) for one in values}) > 1:
            raise UnequalShapesError
        return values

    def strategy(self, device: torch.device, rank: int) -> Any:
        """Return a stand-in for a strategy, with its collective operations."""

        def reduce(tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
            every = torch.stack(self.gather(tensor))
            return every.mean(0) if str(reduce_op).lower() in ("mean", "avg") else every.sum(0)

        def all_gather(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
            if self.num_processes == 1:
                return tensor
            return torch.stack(self.gather(tensor if sync_grads else tensor.detach()))

        return SimpleNamespace(
            root_device=device,
            global_rank=rank,
            world_size=self.num_processes,
            distributed_sampler_kwargs={"num_replicas": self.size, "rank": rank},
            reduce=reduce,
            all_gather=all_gather,
            barrier=lambda *_, **__: self.gather(),
        )

    @contextlib.contextmanager
    def as_torch_distributed(self) -> Iterator[None]:
        """Let ``torch.distributed`` be that of the threads; anything else of it raises."""

        def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any) -> None:
            if op != dist.ReduceOp.SUM:
                raise NotImplementedError(f"all_reduce with {op}")
            every = torch.stack(self.gather(tensor.detach().clone()))
            with torch.no_grad():
                tensor.copy_(every.sum(0))

        functions: dict[str, Any] = {
            "is_initialized": lambda: self.num_processes > 1,
            "get_world_size": lambda *_, **__: self.num_processes,
            "get_rank": lambda *_, **__: self.thread.rank,
            "all_reduce": all_reduce,
            "barrier": lambda *_, **__: self.gather(),
        }
        world, dist.group.WORLD = dist.group.WORLD, None
        try:
            with patch.multiple(dist, **functions):
                yield
        finally:
            dist.group.WORLD = world


class Trainer:
    """A trainer of which a copy reads numbers; it has no methods."""

    def __init__(self, trainer: pl.Trainer, optimizers: Any, rank: int, group: Group) -> None:
        self._trainer, self.optimizers = trainer, optimizers
        self.strategy = group.strategy(trainer.strategy.root_device, rank)
        self.world_size, self.num_nodes = group.num_processes, 1
        self.accumulate_grad_batches = 1
        self.global_rank = self.local_rank = rank
        self.is_global_zero, self.training = rank == 0, True
        self.logger = DummyLogger()
        self.loggers, self.callback_metrics = [self.logger], dict(trainer.callback_metrics)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if inspect.ismethod(value):
            raise AttributeError(f"trainer.{name} is not there for the first-batch check")
        return value
