import logging
import math
import resource
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch

from harness.data.datamodule import RECEIVING_SECONDS
from harness.data.loaders import SharedLoader
from harness.data.shared_batches import SharedBatchSampler
from harness.loggers.metrics_table import MetricsTable
from harness.machine.limits import usable_cores
from harness.processes.agreement import gather
from harness.upstream.resume import num_steps_logged

log = logging.getLogger(__name__)

PARTS = ("data", "transfer", "compute", "between")  # what a step's time is divided into
# The verdict names a cause only if it takes more than this share of the time.
WORTH_MENDING = 0.1


@dataclass
class Spent:
    """Seconds of training steps, by what they were spent on."""

    data: float = 0.0  # waiting for the next batch
    transfer: float = 0.0  # of the batch to the device
    compute: float = 0.0  # forward, backward, optimizer
    between: float = 0.0  # callbacks, logging and the loop, from one step to the next
    num_steps: int = 0
    num_samples: int = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.data + self.transfer + self.compute + self.between

    def share(self, name: str) -> float:
        """The part of one of the four."""
        return float(getattr(self, name) / self.seconds)

    @property
    def samples_per_second(self) -> float:
        """Over all processes."""
        return self.num_samples / self.seconds

    def add(self, other: "Spent") -> None:
        """Count what another has counted."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        return (
            f"{self.samples_per_second:,.0f} samples/s; {self.share('data'):.0%} waiting for data, "
            f"{self.share('transfer'):.0%} transfer, {self.share('compute'):.0%} compute, "
            f"{self.share('between'):.0%} between steps"
        )


class Throughput(pl.Callback):
    """Say how fast the run is, and what holds it back.

    The time of each step is divided at four marks: the batch is asked for, it is there, it is on
    the device, the step is done. On a GPU the marks lie in the device's own queue: it waits for
    data while it has nothing to do, and not while the host waits for data that comes in time. They
    are read when the device has passed them, so that no step waits for it.

    Validation is left out, and the first step, which starts the workers. Of several processes the
    one that waited longest for data counts: the others wait for it in their gradients.
    It must be the first callback, so that the others' work does not count as the transfer.

    Not in ``metrics.csv``, where a run that goes on repeats every number.
    """

    is_watching = False
    verdict: str | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count."""
        self.device = trainer.strategy.root_device
        self.total, self.verdict = Spent(), None  # without the epoch that is running
        self.is_first = True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch the epoch's loader; until its first batch is there, the run waits for data."""
        loader = trainer.train_dataloader
        sampler = getattr(loader, "batch_sampler", None)
        self.is_watching = False
        if not isinstance(loader, SharedLoader) or not isinstance(sampler, SharedBatchSampler):
            return  # a stream, or several loaders at once
        self.is_watching = True
        loader.when_asked, loader.when_there = self._asked, self._there
        self.loader, self.sampler = loader, sampler
        self.spent, self.pending = Spent(), deque[tuple[Any, ...]]()
        self.first_batch: int | None = None
        self.end = self.asked = mark(self.device)

    def _asked(self) -> None:
        if self.asked is None:
            self.asked = mark(self.device)

    def _there(self) -> None:
        self.there = mark(self.device)

    def on_train_batch_start(self, *_: Any) -> None:
        """The batch is on the device."""
        if self.is_watching:
            self.ready = mark(self.device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """The step is done; read the marks that are past."""
        if not self.is_watching:
            return
        end = mark(self.device)
        if not self.is_first:
            if self.first_batch is None:
                self.first_batch = batch_idx
            self.last_batch = batch_idx
            self.pending.append((self.end, self.asked, self.there, self.ready, end))
        self.is_first, self.end, self.asked = False, end, None
        while self.pending and self.pending[0][-1].query():
            self._count(*self.pending.popleft())

    def _count(self, before: Any, asked: Any, there: Any, ready: Any, end: Any) -> None:
        spent = self.spent
        spent.between += before.elapsed_time(asked) / 1000
        spent.data += asked.elapsed_time(there) / 1000
        spent.transfer += there.elapsed_time(ready) / 1000
        spent.compute += ready.elapsed_time(end) / 1000
        spent.num_steps += 1

    def on_validation_end(self, *_: Any) -> None:
        """Leave out a validation between two steps."""
        if self.is_watching:
            self.end = mark(self.device)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell of the epoch."""
        if not self.is_watching or self.first_batch is None:
            return
        for marks in self.pending:
            marks[-1].synchronize()
            self._count(*marks)
        self.pending.clear()
        num_before = self.sampler.num_before
        self.spent.num_samples = num_before(self.last_batch + 1) - num_before(self.first_batch)
        spent = of_slowest(trainer, self.spent)
        self.total.add(spent)
        if trainer.is_global_zero:
            log.info("Epoch %d: %s.", trainer.current_epoch, spent)
            # The step that Lightning gives to an epoch's values; logs are cut back by it.
            step = num_steps_logged(trainer) - 1
            values = {f"throughput/{name}": spent.share(name) for name in PARTS}
            values["throughput/samples_per_second"] = spent.samples_per_second
            for logger in trainer.loggers:
                if not isinstance(logger, MetricsTable):
                    logger.log_metrics(values, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the verdict."""
        if self.total.num_steps:
            num_ranks_here = max(1, trainer.world_size // trainer.num_nodes)
            max_workers = max(1, usable_cores() // num_ranks_here)
            on_cpu = self.device.type == "cpu"
            self.verdict = verdict(self.total, self.loader.num_workers, max_workers, on_cpu)
            self.peak_bytes = peak_bytes(self.device)
            if trainer.is_global_zero:
                log.info("%s", self.verdict)


def of_slowest(trainer: pl.Trainer, spent: Spent) -> Spent:
    """What the process spent that waited longest for data; all of them call it."""
    if trainer.world_size == 1:
        return spent
    everyone: list[Spent] = gather(trainer, spent)
    return max(everyone, key=lambda one: one.data)


def verdict(spent: Spent, num_workers: int, max_workers: int, is_cpu: bool = False) -> str:
    """What holds a run back, and which setting to change.

    Args:
        spent: by all of its steps.
        num_workers: of its loader, per process.
        max_workers: for which there are cores, per process.
        is_cpu: whether the network is computed where the batches are loaded.
    """
    waits = f"{spent.share('data'):.0%} of the time waiting for data"
    if spent.share("data") > WORTH_MENDING:
        return f"input-bound: {waits}; {advice(spent, num_workers, max_workers, is_cpu)}"
    if spent.share("transfer") > WORTH_MENDING:
        remedy = "data.pin_memory=true, or smaller values such as uint8"
        if is_cpu:  # nothing is copied, and only hooks take time there
            remedy = "cheaper on_before_ and on_after_batch_transfer hooks"
        share = f"{spent.share('transfer'):.0%} of the time between a loaded batch and its step"
        return f"transfer-bound: {share}; try {remedy}"
    return f"compute-bound: {waits}"


def advice(spent: Spent, num_workers: int, max_workers: int, is_cpu: bool = False) -> str:
    """How to load as fast as the rest of a step goes."""
    rest = (spent.seconds - spent.data) / spent.num_steps
    if num_workers == 0:
        to_load = spent.data / spent.num_steps
        if to_load < RECEIVING_SECONDS:
            return f"a batch is read in {to_load * 1000:.1f} ms, and workers would not be faster"
    else:  # all of them are busy all the time
        to_load = num_workers * spent.seconds / spent.num_steps
    wanted = math.ceil(min(to_load / max(rest, 1e-6), max_workers))
    if wanted > num_workers:
        shared = ", and compare the speed: workers and the step share the cores" if is_cpu else ""
        return f"try data.num_workers={wanted} (now {num_workers}){shared}"
    return (
        f"data.num_workers={num_workers} uses every core there is: read whole batches "
        "(BatchedDataset) or make the transforms cheaper"
    )


def peak_bytes(device: torch.device) -> int:
    """The most memory that tensors took on a GPU since training began; on a CPU, the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class HostMark:
    """Stand for ``torch.cuda.Event`` on the CPU, which has done its work when the call returns."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: "HostMark") -> float:
        """Milliseconds up to a later mark."""
        return (later.seconds - self.seconds) * 1000

    def query(self) -> bool:
        """Whether the mark is past."""
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""


def mark(device: torch.device) -> Any:
    """Now; on a GPU, which gets its work long before it does it, when the device gets here.

    Between two marks of a GPU lies what it has spent on the work in between; where it had run out
    of work, the time until the host sent more. Other devices are watched from the host.
    """
    if device.type != "cuda":
        return HostMark()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
