"""Settings to begin with on this machine."""

from harness.machine.choice import locked_by
from harness.machine.nvml import Gpu

MOST_WORKERS = 8  # of one process; what is best, only a measurement tells


def recommend(
    num_visible: int,
    num_gpus: int,
    num_busy: int,
    nccl_works: bool,
    num_cores: int,
    workers_can_share: bool,
) -> list[str]:
    """Overrides for the command line.

    Args:
        num_visible: CUDA devices.
        num_gpus: of these, those on which torch computes.
        num_busy: of those, the ones that others use.
        nccl_works: whether several GPUs can add up their gradients.
        num_cores: usable ones.
        workers_can_share: whether there is shared memory for data workers.
    """
    num_devices = max(1, num_gpus - num_busy) if nccl_works else 1
    # auto would try a GPU that does not work.
    alone = "gpu" if num_gpus else "cpu" if num_visible else "auto"
    words = ["strategy=ddp" if num_devices > 1 else f"strategy={alone}"]
    if num_devices < num_gpus:
        words.append("gpus=emptiest")
    # On CPUs the network itself takes the cores.
    num_workers = min(MOST_WORKERS, max(0, num_cores // num_devices - 1)) if num_gpus else 0
    return [
        *words,
        f"trainer.devices={num_devices}",
        f"data.num_workers={num_workers if workers_can_share else 0}",
        f"data.pin_memory={'true' if num_gpus else 'false'}",
    ]


def is_busy(gpu: Gpu) -> bool:
    """Whether a run has taken it, or others have more than half of its memory."""
    return bool(locked_by(gpu)) or gpu.free_bytes < gpu.total_bytes / 2
