"""Measure how fast a run is, how much of its time it waits for data, and how it uses its GPUs.

In: the training loader, which reports when a batch is asked for and when it is there, and samples
of the GPUs. Out: a line per epoch in ``run.log``, values for the loggers, and at the end the
verdict with the setting to change, which ``training.summary`` writes and shows.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from harness.compat.compilations import on_compilation
from harness.data.loaders import SharedLoader
from harness.data.shared_batches import SharedBatchSampler
from harness.devices import usable_cores
from harness.distributed.vote import gather
from harness.monitoring.gpu_use import GpuSampler, GpuUse, gpus_of, of_all
from harness.monitoring.verdict import Setup, Spent, verdict

log = logging.getLogger(__name__)
STEPS_LATER = 50  # a device is never so far behind


class Throughput(pl.Callback):
    """Report samples per second, what limits the run, and how full and busy its GPUs are.

    On a GPU the times are events in the device's own queue, read ``STEPS_LATER``, so that no step
    waits for them. Validation is left out, and so are the first step, which starts the workers, and
    steps in which something is compiled. Of streams, and several loaders at once, the GPUs alone
    are measured. Whether the GPU is slower than Python is asked once in a step: at its end, has the
    device passed the end of the backward pass? Then it has nothing left to do but the update.
    """

    is_measuring = False
    verdict: str | None = None
    gpus: GpuSampler | None = None
    gpu_use: GpuUse | None = None  # of all ranks since the start
    end_watching: Callable[[], None] = staticmethod(lambda: None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the measurement."""
        self.device = trainer.strategy.root_device
        self.total, self.verdict, self.gpu_use = Spent(), None, None  # without the running epoch
        self.is_first_step, self.has_compiled, self.num_compiled = True, False, 0
        self.backward_end: Any = None
        self.epoch_use = self.use_before = GpuUse()
        self.end_watching = on_compilation(self._compiles)
        devices = gpus_of(trainer)
        self.gpus = GpuSampler(devices) if devices else None

    def _compiles(self) -> None:
        self.has_compiled, self.num_compiled = True, self.num_compiled + 1

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Observe the epoch's loader; until its first batch is there, the run waits for data."""
        loader: Any = trainer.train_dataloader
        self.sampler: Any = getattr(loader, "batch_sampler", None)
        is_shared = isinstance(self.sampler, SharedBatchSampler)
        self.is_measuring = is_shared and isinstance(loader, SharedLoader)
        if self.is_measuring:
            loader.on_batch_requested, loader.on_batch_ready = self._asked, self._there
            self.num_workers = loader.num_workers
            self.spent, self.pending = Spent(), deque[tuple[Any, ...]]()
            self.start = self.asked = mark(self.device)

    def _asked(self) -> None:
        if self.asked is None:
            self.asked = mark(self.device)

    def _there(self) -> None:
        self.there = mark(self.device)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the end of the backward pass."""
        if self.is_measuring:
            self.backward_end = mark(self.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, __: Any, batch_idx: int
    ) -> None:
        """Mark the end of the step; read the marks of an earlier one."""
        if not self.is_measuring:
            return
        end, before = mark(self.device), self.sampler.num_before
        if not self.is_first_step and not self.has_compiled:
            num_samples = before(batch_idx + 1) - before(batch_idx)
            self.spent.num_drained += has_passed(self.backward_end)
            self.pending.append((self.start, self.asked, self.there, end, num_samples))
        self.is_first_step, self.start, self.asked = False, end, None
        self.has_compiled, self.backward_end = False, None
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
            self.start, self.has_compiled = mark(self.device), False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the epoch."""
        if not (self.is_measuring or self.gpus):
            return
        spent, use = Spent(), GpuUse()
        if self.is_measuring:
            self._read(0)
            spent = self.spent
        if self.gpus:
            use = self.gpus.use()
        ranks = gather(trainer, (spent, use))
        # The other processes wait in their gradients for the one that waits longest for data.
        spent = max((one for one, _ in ranks), key=lambda one: one.data)
        self.total += spent
        parts = []
        if spent.num_steps:
            parts.append(f"{spent.num_samples / spent.seconds:,.0f} samples/s")
            parts.append(f"{spent.data / spent.seconds:.0%} of the time waiting for data")
        if self.gpus:
            self.gpu_use = of_all([one for _, one in ranks])
            self.epoch_use, self.use_before = self.gpu_use.since(self.use_before), self.gpu_use
            parts.append(f"GPU {self.epoch_use}")
        if parts and trainer.is_global_zero:
            log.info("Epoch %d: %s.", trainer.current_epoch, ", ".join(parts))

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Send the use of the GPUs to the loggers alone: it is no metric that may be monitored."""
        if stage != "train_epoch" or self.gpu_use is None:
            return
        numbers = {"gpu/memory_gib": self.epoch_use.peak_bytes / 2**30}
        if (busy := self.epoch_use.busy) is not None:
            numbers["gpu/busy"] = busy
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the verdict."""
        self._stop()
        if self.total.num_steps:
            max_workers = max(1, usable_cores() * trainer.num_nodes // trainer.world_size)
            precision = None
            if self.device.type == "cuda" and trainer.precision == "32-true":
                precision = "bf16-mixed" if torch.cuda.is_bf16_supported(False) else "16-mixed"
            setup = Setup(
                self.num_workers,
                max_workers,
                faster_precision=precision,
                is_compiled=self.num_compiled > 0,
                is_on_gpu=self.device.type == "cuda",
                gpu_busy=self.gpu_use.busy if self.gpu_use else None,
            )
            self.verdict = verdict(self.total, setup)
            if trainer.is_global_zero:
                log.info("%s", self.verdict)

    def on_exception(self, *_: Any) -> None:
        """Stop measuring."""
        self._stop()

    def _stop(self) -> None:
        if self.gpus:
            self.gpus.stop()
        self.end_watching()

    def results(self) -> dict[str, Any]:
        """Return what record.json keeps; without what was not measured."""
        found: dict[str, Any] = {}
        if self.verdict is not None:
            speed = self.total.num_samples / self.total.seconds
            found = {"samples_per_second": round(speed, 1), "verdict": self.verdict}
        if use := self.gpu_use:
            gibs = {"gpu_gib": use.peak_bytes, "gpu_total_gib": use.total_bytes}
            found |= {name: round(value / 2**30, 2) for name, value in gibs.items()}
            found |= {} if use.busy is None else {"gpu_busy": round(use.busy, 3)}
        return found


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


def has_passed(mark: Any) -> bool:
    """Return whether a GPU has passed a mark, without waiting; ``False`` where there is no GPU."""
    return isinstance(mark, torch.cuda.Event) and bool(mark.query())  # type: ignore[no-untyped-call]
