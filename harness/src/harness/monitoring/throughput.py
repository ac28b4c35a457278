"""Measure a run's throughput, the time it waits for data, and its use of the GPUs.

In: the training loader, which reports when a batch is requested and when it is ready, and samples
of the GPUs. Out: a line per epoch in ``run.log``, values for the loggers, and at the end the
verdict, which names the setting to change. Next: ``training.summary`` writes and prints it.
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
from harness.distributed.gather import gather
from harness.monitoring.gpu_use import GpuSampler, GpuUse, gpus_of, of_all
from harness.monitoring.verdict import Setup, Spent, verdict

log = logging.getLogger(__name__)
STEPS_LATER = 50  # the device is never this many steps behind the host


class Throughput(pl.Callback):
    """Report samples per second, what limits the run, and memory and utilisation of its GPUs.

    On a GPU the times are CUDA events, which are read ``STEPS_LATER`` steps later, so that no step
    synchronises. The measurement leaves out validation, steps in which something is compiled, and
    the first step, which starts the workers. With a stream, or with several loaders at once, only
    the GPUs are measured.

    At the end of each step the host checks whether the GPU has finished the backward pass. If so,
    the GPU's queue holds at most the update: in this step Python was slower than the GPU.
    """

    is_measuring = False
    verdict: str | None = None
    gpus: GpuSampler | None = None
    gpu_use: GpuUse | None = None  # of all ranks since the start
    end_watching: Callable[[], None] = staticmethod(lambda: None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the measurement."""
        self.device = trainer.strategy.root_device
        self.total, self.verdict, self.gpu_use = Spent(), None, None  # total of finished epochs
        self.is_first_step, self.has_compiled, self.num_compiled = True, False, 0
        self.backward_end: Any = None
        self.epoch_use = self.use_before = GpuUse()
        self.end_watching = on_compilation(self._compiles)
        devices = gpus_of(trainer)
        self.gpus = GpuSampler(devices) if devices else None

    def _compiles(self) -> None:
        self.has_compiled, self.num_compiled = True, self.num_compiled + 1

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Observe the epoch's loader; the run waits for data until the first batch is ready."""
        loader: Any = trainer.train_dataloader
        self.sampler: Any = getattr(loader, "batch_sampler", None)
        is_shared = isinstance(self.sampler, SharedBatchSampler)
        self.is_measuring = is_shared and isinstance(loader, SharedLoader)
        if self.is_measuring:
            loader.on_batch_requested, loader.on_batch_ready = self._on_requested, self._on_ready
            self.num_workers = loader.num_workers
            self.spent, self.pending = Spent(), deque[tuple[Any, ...]]()
            self.start = self.requested = now(self.device)

    def _on_requested(self) -> None:
        if self.requested is None:
            self.requested = now(self.device)

    def _on_ready(self) -> None:
        self.ready = now(self.device)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record when the backward pass ends."""
        if self.is_measuring:
            self.backward_end = now(self.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, _: Any, __: Any, batch_idx: int
    ) -> None:
        """Record when the step ends; add up the times of earlier steps."""
        if not self.is_measuring:
            return
        end, before = now(self.device), self.sampler.num_before
        if not self.is_first_step and not self.has_compiled:
            num_samples = before(batch_idx + 1) - before(batch_idx)
            self.spent.num_drained += has_passed(self.backward_end)
            self.pending.append((self.start, self.requested, self.ready, end, num_samples))
        self.is_first_step, self.start, self.requested = False, end, None
        self.has_compiled, self.backward_end = False, None
        self._read(STEPS_LATER)

    def _read(self, num_left: int) -> None:
        while len(self.pending) > num_left:
            start, requested, ready, end, num_samples = self.pending.popleft()
            self.spent.data += seconds_between(requested, ready)
            self.spent.seconds += seconds_between(start, end)
            self.spent.num_steps += 1
            self.spent.num_samples += num_samples

    def on_validation_end(self, *_: Any) -> None:
        """Start the next step's time here, to leave out a validation between two steps."""
        if self.is_measuring:
            self.start, self.has_compiled = now(self.device), False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the throughput and the GPUs' use in this epoch. All ranks must call this."""
        if not (self.is_measuring or self.gpus):
            return
        spent, use = Spent(), GpuUse()
        if self.is_measuring:
            self._read(0)
            spent = self.spent
        if self.gpus:
            use = self.gpus.use()
        ranks = gather(trainer, (spent, use))
        # Use the times of the rank that waits longest for data: the others wait for this rank.
        spent = max((rank_spent for rank_spent, _ in ranks), key=lambda spent: spent.data)
        self.total += spent
        texts = []
        if spent.num_steps:
            texts.append(f"{spent.num_samples / spent.seconds:,.0f} samples/s")
            texts.append(f"{spent.data / spent.seconds:.0%} of the time waiting for data")
        if self.gpus:
            self.gpu_use = of_all([rank_use for _, rank_use in ranks])
            self.epoch_use, self.use_before = self.gpu_use.since(self.use_before), self.gpu_use
            texts.append(f"GPU {self.epoch_use}")
        if texts and trainer.is_global_zero:
            log.info("Epoch %d: %s.", trainer.current_epoch, ", ".join(texts))

    def on_values(
        self, trainer: pl.Trainer, stage: str, epoch: int, step: int, values: dict[str, float]
    ) -> None:
        """Send the GPUs' use to the loggers alone, because it is no metric to monitor."""
        if stage != "train_epoch" or self.gpu_use is None:
            return
        gpu_values = {"gpu/memory_gib": self.epoch_use.peak_bytes / 2**30}
        if (busy := self.epoch_use.busy) is not None:
            gpu_values["gpu/busy"] = busy
        for logger in trainer.loggers:
            logger.log_metrics(gpu_values, step=step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop measuring, and log the verdict."""
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
        """Return the measured values for record.json: speed, verdict, memory and utilisation."""
        found: dict[str, Any] = {}
        if self.verdict is not None:
            speed = self.total.num_samples / self.total.seconds
            found = {"samples_per_second": round(speed, 1), "verdict": self.verdict}
        if use := self.gpu_use:
            gibs = {"gpu_gib": use.peak_bytes, "gpu_total_gib": use.total_bytes}
            found |= {name: round(value / 2**30, 2) for name, value in gibs.items()}
            found |= {} if use.busy is None else {"gpu_busy": round(use.busy, 3)}
        return found


def now(device: torch.device) -> Any:
    """Return the current time, or on a GPU an event recorded in the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two results of ``now``; wait until a GPU has passed ``end``."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()  # synchronises
    return float(start.elapsed_time(end)) / 1000


def has_passed(event: Any) -> bool:
    """Return whether a GPU has passed an event, without waiting; ``False`` without a GPU."""
    return isinstance(event, torch.cuda.Event) and bool(event.query())  # type: ignore[no-untyped-call]
