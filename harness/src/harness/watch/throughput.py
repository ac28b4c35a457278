"""Measure how fast a run is, and how much of its time it waits for data.

In: the training loader, which reports when a batch is asked for and when it is there. Out: a line
per epoch in ``run.log``, two curves, and at the end the verdict with the setting to change, which
``run.summary`` writes and shows.
"""

import logging
import math
import os
import time
from collections import deque
from dataclasses import astuple, dataclass
from typing import Any

import pytorch_lightning as pl
import torch

from harness.data.loaders import SharedLoader
from harness.data.shared_batches import SharedBatchSampler
from harness.loggers.metrics_table import MetricsTable
from harness.machine.limits import usable_cores
from harness.processes.agreement import gather
from harness.upstream.resume import num_steps_logged

log = logging.getLogger(__name__)

CROWDED = 1.5  # the load of a core above which other programs slow threads down
RECEIVING_SECONDS = 0.001  # to take a batch from a worker: a faster data set needs none
INPUT_BOUND = 0.1  # the share of the time above which waiting for data is worth mending


@dataclass
class Spent:
    """Seconds of training steps."""

    data: float = 0.0  # waiting for the next batch
    rest: float = 0.0
    num_steps: int = 0
    num_samples: int = 0  # of all processes

    @property
    def waited(self) -> float:
        """The share of the time that was spent waiting for data."""
        return self.data / (self.data + self.rest)

    @property
    def samples_per_second(self) -> float:
        """The speed of all processes together."""
        return self.num_samples / (self.data + self.rest)

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Throughput(pl.Callback):
    """Report samples per second, and whether the run waits for data.

    On a GPU the times are events in the device's own queue: it waits for data while it has nothing
    to do, and not while the host waits for data that comes in time. Events are read when the device
    has passed them, so that no step waits for it. Validation is left out, and so is the first step,
    which starts the workers. Streams, and several loaders at once, are not measured.

    Nothing goes to ``metrics.csv``, in which a run that goes on repeats every number.
    """

    is_measuring = False
    verdict: str | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the measurement."""
        self.device = trainer.strategy.root_device
        self.total, self.verdict = Spent(), None  # without the epoch that is running
        self.is_first_step = True
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Observe the epoch's loader; until its first batch is there, the run waits for data."""
        loader: Any = trainer.train_dataloader
        sampler: Any = getattr(loader, "batch_sampler", None)
        self.is_measuring = isinstance(loader, SharedLoader) and isinstance(
            sampler, SharedBatchSampler
        )
        if self.is_measuring:
            loader.when_asked, loader.when_there = self._asked, self._there
            self.num_workers, self.num_samples_before = loader.num_workers, sampler.num_before
            self.spent, self.pending = Spent(), deque[tuple[Any, ...]]()
            self.first_batch: int | None = None
            self.start = self.asked = mark(self.device)

    def _asked(self) -> None:
        if self.asked is None:
            self.asked = mark(self.device)

    def _there(self) -> None:
        self.there = mark(self.device)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Mark the end of the step; read the marks that the device has passed."""
        if not self.is_measuring:
            return
        end = mark(self.device)
        if not self.is_first_step:
            if self.first_batch is None:
                self.first_batch = batch_idx
            self.last_batch = batch_idx
            self.pending.append((self.start, self.asked, self.there, end))
        self.is_first_step, self.start, self.asked = False, end, None
        while self.pending and self.pending[0][-1].query():
            self._count(*self.pending.popleft())

    def _count(self, start: Any, asked: Any, there: Any, end: Any) -> None:
        waited = asked.elapsed_time(there) / 1000
        self.spent += Spent(waited, start.elapsed_time(end) / 1000 - waited, 1)

    def on_validation_end(self, *_: Any) -> None:
        """Leave out a validation between two steps."""
        if self.is_measuring:
            self.start = mark(self.device)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the epoch."""
        if not self.is_measuring or self.first_batch is None:
            return
        for marks in self.pending:
            marks[-1].synchronize()
            self._count(*marks)
        self.pending.clear()
        before = self.num_samples_before
        self.spent.num_samples = before(self.last_batch + 1) - before(self.first_batch)
        # The other processes wait in their gradients for the one that waits longest for data.
        spent: Spent = max(gather(trainer, self.spent), key=lambda one: one.data)
        self.total += spent
        if trainer.is_global_zero:
            speed, share = spent.samples_per_second, spent.waited
            log.info(
                "Epoch %d: %s samples/s, %.0f%% of the time waiting for data.",
                *(trainer.current_epoch, f"{speed:,.0f}", 100 * share),
            )
            values = {"throughput/samples_per_second": speed, "throughput/data": share}
            step = num_steps_logged(trainer) - 1  # the step of an epoch's values in Lightning
            for logger in trainer.loggers:
                if not isinstance(logger, MetricsTable):
                    logger.log_metrics(values, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the verdict."""
        if self.total.num_steps:
            num_processes_here = max(1, trainer.world_size // trainer.num_nodes)
            max_workers = max(1, usable_cores() // num_processes_here)
            self.verdict = verdict(self.total, self.num_workers, max_workers)
            load, num_cores = machine_load()
            is_crowded = load > CROWDED * num_cores and torch.get_num_threads() > 1
            if is_crowded and self.device.type == "cpu":
                self.verdict += (
                    f"; {num_cores} cores have a load of {load:.1f}: threads wait for each other, "
                    "and OMP_NUM_THREADS=1 may be faster"
                )
            if trainer.is_global_zero:
                log.info("%s", self.verdict)

    def results(self) -> dict[str, Any]:
        """What is kept of a run's speed; empty where it was not measured."""
        if self.verdict is None:
            return {}
        speed = {"samples_per_second": round(self.total.samples_per_second, 1)}
        if self.device.type == "cuda":
            speed["peak_mib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20)
        return {**speed, "verdict": self.verdict}


def verdict(spent: Spent, num_workers: int, max_workers: int) -> str:
    """Say what holds a run back, and which setting to change.

    Args:
        spent: by all of its steps.
        num_workers: of its loader, per process.
        max_workers: for which there are cores, per process.
    """
    waits = f"{spent.waited:.0%} of the time waiting for data"
    if spent.waited <= INPUT_BOUND:
        return f"compute-bound: {waits}"
    return f"input-bound: {waits}; {advice(spent, num_workers, max_workers)}"


def machine_load() -> tuple[float, int]:
    """Return how many processes have wanted to run in the last minute, and the number of cores."""
    return os.getloadavg()[0], os.cpu_count() or 1


def advice(spent: Spent, num_workers: int, max_workers: int) -> str:
    """Say how to load as fast as the rest of a step goes."""
    load, num_cores = machine_load()
    if load > num_cores:
        return f"{num_cores} cores have a load of {load:.1f}, and more workers would not be faster"
    if num_workers == 0:
        seconds = spent.data / spent.num_steps
        if seconds < RECEIVING_SECONDS:
            return f"a batch is read in {seconds * 1000:.1f} ms, and workers would not be faster"
    else:  # all of them are busy all the time
        seconds = num_workers * (spent.data + spent.rest) / spent.num_steps
    needed = seconds / max(spent.rest / spent.num_steps, 1e-6)
    if (num_wanted := math.ceil(min(needed, max_workers))) > num_workers:
        return f"try data.num_workers={num_wanted} (now {num_workers})"
    return (
        f"data.num_workers={num_workers} uses every core there is: read whole batches "
        "(BatchedDataset) or make the transforms cheaper"
    )


class HostMark:
    """Stand in for ``torch.cuda.Event`` on a CPU, whose work is done when the call returns."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, later: "HostMark") -> float:
        """Milliseconds up to a later mark."""
        return (later.seconds - self.seconds) * 1000

    def query(self) -> bool:
        """Whether the mark is past."""
        return True

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


def mark(device: torch.device) -> Any:
    """Mark this moment; on a GPU the moment at which its queue of work gets here."""
    if device.type != "cuda":
        return HostMark()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
