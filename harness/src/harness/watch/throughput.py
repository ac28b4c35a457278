"""Measure how fast a run is, and how much of its time it waits for data.

In: the training loader, which reports when a batch is asked for and when it is there. Out: a line
per epoch in ``run.log``, and at the end the verdict with the setting to change, which
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
from harness.machine import usable_cores
from harness.processes.agreement import gather

log = logging.getLogger(__name__)

CROWDED = 1.5  # the load of a core above which other programs slow this one down
RECEIVING_SECONDS = 0.001  # to take a batch from a worker: a faster data set needs none
STEPS_LATER = 50  # a device is never so far behind
INPUT_BOUND = 0.1  # the share of the time above which waiting for data is worth mending


@dataclass
class Spent:
    """Seconds of training steps, and what was done in them."""

    data: float = 0.0  # of these, waiting for the next batch
    seconds: float = 0.0
    num_steps: int = 0
    num_samples: int = 0  # of all processes

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Throughput(pl.Callback):
    """Report samples per second, and whether the run waits for data.

    On a GPU the times are events in the device's own queue, read ``STEPS_LATER``, so that no step
    waits for them. Validation is left out, and so is the first step, which starts the workers.
    Streams, and several loaders at once, are not measured.
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
        self.sampler: Any = getattr(loader, "batch_sampler", None)
        is_shared = isinstance(self.sampler, SharedBatchSampler)
        self.is_measuring = is_shared and isinstance(loader, SharedLoader)
        if self.is_measuring:
            loader.when_asked, loader.when_there = self._asked, self._there
            self.num_workers = loader.num_workers
            self.spent, self.pending = Spent(), deque[tuple[Any, ...]]()
            self.start = self.asked = mark(self.device)

    def _asked(self) -> None:
        if self.asked is None:
            self.asked = mark(self.device)

    def _there(self) -> None:
        self.there = mark(self.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, __: Any, batch_idx: int
    ) -> None:
        """Mark the end of the step; read the marks of an earlier one."""
        if not self.is_measuring:
            return
        end, before = mark(self.device), self.sampler.num_before
        if not self.is_first_step:
            num_samples = before(batch_idx + 1) - before(batch_idx)
            self.pending.append((self.start, self.asked, self.there, end, num_samples))
        self.is_first_step, self.start, self.asked = False, end, None
        self._read(STEPS_LATER)

    def _read(self, num_left: int) -> None:
        while len(self.pending) > num_left:
            start, asked, there, end, num_samples = self.pending.popleft()
            self.spent.data += seconds_between(asked, there)
            self.spent.seconds += seconds_between(start, end)
            self.spent.num_steps += 1
            self.spent.num_samples += num_samples

    def on_validation_end(self, *_: Any) -> None:
        """Leave out a validation between two steps."""
        if self.is_measuring:
            self.start = mark(self.device)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the epoch."""
        if not self.is_measuring:
            return
        self._read(0)
        # The other processes wait in their gradients for the one that waits longest for data.
        spent: Spent = max(gather(trainer, self.spent), key=lambda one: one.data)
        self.total += spent
        if trainer.is_global_zero and spent.num_steps:
            log.info(
                "Epoch %d: %s samples/s, %.0f%% of the time waiting for data.",
                *(trainer.current_epoch, f"{spent.num_samples / spent.seconds:,.0f}"),
                100 * spent.data / spent.seconds,
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the verdict."""
        if self.total.num_steps:
            max_workers = max(1, usable_cores() * trainer.num_nodes // trainer.world_size)
            self.verdict = verdict(self.total, self.num_workers, max_workers)
            if trainer.is_global_zero:
                log.info("%s", self.verdict)

    def results(self) -> dict[str, Any]:
        """Return the speed that results.json keeps; empty where it was not measured."""
        if self.verdict is None:
            return {}
        speed = {"samples_per_second": round(self.total.num_samples / self.total.seconds, 1)}
        if self.device.type == "cuda":
            speed["peak_mib"] = round(torch.cuda.max_memory_allocated(self.device) / 2**20)
        return {**speed, "verdict": self.verdict}


def verdict(spent: Spent, num_workers: int, max_workers: int) -> str:
    """Say what holds a run back, and which setting to change; workers are those of one process."""
    share = spent.data / spent.seconds
    bound = "input-bound" if share > INPUT_BOUND else "compute-bound"
    text = f"{bound}: {share:.0%} of the time waiting for data"
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > CROWDED * num_cores:
        hint = ", and OMP_NUM_THREADS=1 may be faster" if torch.get_num_threads() > 1 else ""
        return (
            f"{text}; other programs slow this one down: {num_cores} cores have a load of "
            f"{load:.1f}{hint}"
        )
    if share <= INPUT_BOUND:
        return text
    each = spent.data / spent.num_steps
    if num_workers == 0 and each < RECEIVING_SECONDS:
        return f"{text}, {1000 * each:.1f} ms a batch"
    # A worker that is there is busy all the time.
    seconds = num_workers * spent.seconds if num_workers else spent.data
    needed = seconds / max(spent.seconds - spent.data, 1e-6)
    if (num_wanted := math.ceil(min(needed, max_workers))) > num_workers:
        return f"{text}; try data.num_workers={num_wanted} (now {num_workers})"
    return f"{text}; read whole batches (BatchedDataset) or make the transforms cheaper"


def mark(device: torch.device) -> Any:
    """Mark this moment; on a GPU the moment at which its queue of work gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the time between two marks; a GPU is waited for until it has passed the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
