"""How much a step computes, what share that is of what the devices can, and the most memory."""

import math
import resource
import sys
import time
import warnings
from dataclasses import dataclass

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.throughput import get_available_flops

SECONDS = 0.1  # of products that show what a CPU can
SIZE = 1024  # of their matrices
DTYPES = {"64": torch.float64, "bf": torch.bfloat16, "16": torch.float16}


@dataclass
class Work:
    """Of a run, all processes together; NaN is not known."""

    flops_per_step: float
    share: float  # of the peak of all devices, over all of the time: MFU
    peak_bytes: float  # of the process, or of the GPU, that had the most
    is_cpu: bool
    dtype: str = "float32"  # of the run's products

    @property
    def facts(self) -> dict[str, float | str]:
        """What is known, for a run's record."""
        numbers = {"flops_per_step": self.flops_per_step, "peak_share": self.share}
        numbers["peak_bytes"] = self.peak_bytes
        known = {name: value for name, value in numbers.items() if math.isfinite(value)}
        return {**known, "work": str(self)}

    def __str__(self) -> str:
        said = []
        if math.isfinite(self.flops_per_step):
            said.append(f"{shortened(self.flops_per_step)}FLOP per step")
        if math.isfinite(self.share):
            peak = "what a matrix product reaches here" if self.is_cpu else "the device's peak"
            said.append(f"{self.share:.1%} of {peak} in {self.dtype}")
        where = "process" if self.is_cpu else "GPU"
        return ", ".join([*said, f"{self.peak_bytes / 2**20:,.0f} MiB in one {where} at most"])


def work(
    trainer: pl.Trainer, flops: float, samples_per_batch: int, samples_per_second: float
) -> Work:
    """Sum up what processes have counted; all of them call it, at the same time.

    Args:
        trainer: at the end of its training.
        flops: of this process for one batch.
        samples_per_batch: of the same batch, over all processes.
        samples_per_second: over all processes.
    """
    device = trainer.strategy.root_device
    mine = torch.tensor(
        [flops, peak_flops(trainer) if flops > 0 else math.nan, peak_bytes(trainer)]
    )
    # (3,), or (ranks, 3) of several processes
    everyone = trainer.strategy.all_gather(mine.to(device)).reshape(-1, 3)
    total, peak = everyone[:, :2].sum(0).tolist()
    share = total / samples_per_batch * samples_per_second / peak
    per_step = total * trainer.accumulate_grad_batches
    most, dtype = everyone[:, 2].max().item(), str(dtype_of(trainer)).removeprefix("torch.")
    return Work(per_step, share, most, device.type == "cpu", dtype)


def peak_flops(trainer: pl.Trainer) -> float:
    """FLOPs per second that this process's devices can reach in the run's precision.

    Of a GPU it is what its maker says of dense products, for those that Lightning knows (no H200);
    of a CPU what ``torch.mm`` reaches with the run's threads, while other processes do the same.
    """
    device = trainer.strategy.root_device
    dtype = dtype_of(trainer)
    if device.type == "cuda":
        with warnings.catch_warnings():  # of a GPU that it does not know
            warnings.simplefilter("ignore")
            found = get_available_flops(device, dtype)
        return (found or math.nan) * num_devices(trainer)
    if device.type != "cpu":
        return math.nan
    matrix, best = torch.ones(SIZE, SIZE, dtype=dtype), math.inf  # nothing is drawn
    end = time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end or best == math.inf:
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - start)
    return 2 * SIZE**3 / best


def dtype_of(trainer: pl.Trainer) -> torch.dtype:
    """The type that the run's products are computed in."""
    return DTYPES.get(str(trainer.precision)[:2], torch.float32)


def peak_bytes(trainer: pl.Trainer) -> float:
    """The most memory of one of this process's GPUs, in tensors; of a CPU's process all of it."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        several = getattr(trainer.strategy, "parallel_devices", [])
        devices = several if num_devices(trainer) > 1 else [device]
        return float(max(map(torch.cuda.max_memory_allocated, devices)))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def num_devices(trainer: pl.Trainer) -> int:
    """Devices that one process drives: several under dp and ddp2."""
    return max(1, trainer.num_devices * trainer.num_nodes // trainer.world_size)


def shortened(number: float) -> str:
    """A number with three figures and the prefix of its unit, as ``35.2 M``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
