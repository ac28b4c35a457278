"""Sample memory and utilisation of this rank's GPUs once a second, in a thread.

In: torch's devices. Out: ``GpuUse``, for ``Throughput``. NVML numbers GPUs in another order than
CUDA, so a GPU is looked up by its UUID. Without NVML, or after an NVML error, only torch's peak
memory is known.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytorch_lightning as pl
import torch

from harness.devices import gib

log = logging.getLogger(__name__)
SECONDS_BETWEEN = 1.0
CONTEXT_BYTES = 2**30  # for CUDA itself and its libraries, and a margin
TIMES_LARGER = 4  # if a batch this many times as large fits, the summary suggests it


@dataclass(frozen=True)
class GpuUse:
    """Memory of the fullest GPU, and utilisation of all GPUs, of one rank or of all ranks."""

    peak_bytes: int = 0  # the most bytes that torch has reserved
    total_bytes: int = 1
    other_bytes: int = 0  # bytes beyond peak_bytes, by NVML: other programs, and CUDA itself
    busy_sum: float = 0.0  # sum of the samples, each from 0 to 1
    num_samples: int = 0

    @property
    def busy(self) -> float | None:
        """Return the fraction of the time in which a kernel ran; ``None`` if unknown."""
        return self.busy_sum / self.num_samples if self.num_samples else None

    def since(self, before: "GpuUse") -> "GpuUse":
        """Return the use with only the samples after ``before``; the peak is that of the run."""
        num_samples = self.num_samples - before.num_samples
        return replace(self, busy_sum=self.busy_sum - before.busy_sum, num_samples=num_samples)

    def __str__(self) -> str:
        busy = "" if self.busy is None else f", busy {self.busy:.0%} of the time"
        return f"{self.peak_bytes / 2**30:.1f} of {gib(self.total_bytes)} at peak{busy}"

    def fits_larger_batch(self) -> bool:
        """Return whether a batch four times as large would certainly fit."""
        needed = TIMES_LARGER * self.peak_bytes + max(self.other_bytes, CONTEXT_BYTES)
        return self.peak_bytes > 0 and needed < self.total_bytes


def of_all(uses: Sequence[GpuUse]) -> GpuUse:
    """Combine the uses of ranks: memory of the fullest GPU, and the sum of all samples."""
    fullest = max(uses, key=lambda use: use.peak_bytes / use.total_bytes)
    busy_sum = sum(use.busy_sum for use in uses)
    return replace(fullest, busy_sum=busy_sum, num_samples=sum(use.num_samples for use in uses))


def gpus_of(trainer: pl.Trainer) -> list[torch.device]:
    """List the CUDA devices of this rank: one device, or all of the node under dp and ddp2."""
    from harness.strategies.dp import NodeParallelStrategy

    strategy, devices = trainer.strategy, [trainer.strategy.root_device]
    if isinstance(strategy, NodeParallelStrategy):
        devices = strategy.parallel_devices or devices
    return [device for device in devices if device.type == "cuda"]


class GpuSampler:
    """Sample GPUs until ``stop``; if NVML fails, log the error at level DEBUG."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        uuids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
        # The sum and the number of samples, and the largest number of used bytes of each GPU. The
        # thread assigns a new tuple each time, so that a reader needs no lock.
        self.seen: tuple[float, int, list[int]] = 0.0, 0, [0] * len(devices)
        self.is_stopped = threading.Event()
        # A daemon thread does not keep a failed process alive.
        self.thread = threading.Thread(target=self._sample, args=[uuids], daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self.is_stopped.set()

    def use(self) -> GpuUse:
        """Return the use since the start, without synchronising with a device."""
        busy_sum, num_samples, used = self.seen
        uses = []
        for device, used_bytes in zip(self.devices, used, strict=True):
            peak_bytes = torch.cuda.max_memory_reserved(device)
            total_bytes = torch.cuda.get_device_properties(device).total_memory
            others = max(0, used_bytes - peak_bytes)
            uses.append(GpuUse(peak_bytes, total_bytes, others))
        return replace(of_all(uses), busy_sum=busy_sum, num_samples=num_samples)

    def _sample(self, uuids: Sequence[str]) -> None:
        try:
            import pynvml as nvml

            nvml.nvmlInit()
        except Exception as error:  # no driver, or no package
            log.debug("GPU utilisation is unknown, because NVML cannot be loaded: %s", error)
            return
        try:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            while not self.is_stopped.wait(SECONDS_BETWEEN):
                busy_sum, num_samples, used = self.seen
                for handle in handles:
                    busy_sum += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                now = [int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
                self.seen = busy_sum, num_samples + len(handles), [*map(max, used, now)]
        except Exception as error:  # of NVML: a lost GPU, or a MIG instance
            log.debug("GPU utilisation is unknown from now on, because NVML failed: %s", error)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
