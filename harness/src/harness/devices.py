"""Count this machine's cores and GPUs, and choose the GPUs with the most free memory.

In: the number of GPUs, and the memory that must be free on each. Out: ``CUDA_VISIBLE_DEVICES``,
which all ranks on this machine inherit. A run locks the GPUs that it chooses against other runs
with ``gpus=emptiest``. A lock is a name in Linux's abstract socket namespace, which all users of a
machine share. The system frees the name when the process ends. This module does not initialise
CUDA, and imports torch only if NVML is missing.
"""

import os
import platform
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVERS = (Path("/dev/kfd"), Path("/dev/nvidiactl"), Path("/dev/nvhost-ctrl"))  # AMD's, NVIDIA's
GROUPS = Path("/sys/fs/cgroup")  # within a container, this is the container's control group
MIG = "MIG is on: name its device in CUDA_VISIBLE_DEVICES, and leave out gpus=emptiest"
PREFIX = "train_"  # the beginning of a lock's name
locks: dict[str, socket.socket] = {}  # the locks of this process, by the UUID of the GPU


def usable_cores() -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")  # missing on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError):  # no Linux, control groups of version 1, or no permission
        quota, period = (GROUPS / "cpu.max").read_text().split()  # in microseconds
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


@dataclass(eq=False)
class Gpu:
    """An NVIDIA GPU, as NVML describes it."""

    number: str  # the index that nvidia-smi shows
    uuid: str = ""  # for CUDA_VISIBLE_DEVICES; empty if the GPU does not answer
    name: str = "unknown"
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""  # why no run can start on it, or empty


def gpus() -> list[Gpu]:
    """Return all NVIDIA GPUs, in the order of their PCI bus ids; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml as nvml

    gpu = Gpu(str(index))
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu.uuid, gpu.name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        with suppress(nvml.NVMLError):  # most GPUs do not support MIG
            if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                gpu.problem = MIG
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu.total_bytes, gpu.free_bytes = int(memory.total), int(memory.free)
    except nvml.NVMLError as error:  # a lost GPU, no permission, or shared memory
        gpu.problem = str(error)
    return gpu


def is_apple_silicon() -> bool:
    """Return whether this machine's GPU is Apple's own, which torch calls mps."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def num_gpus() -> int:
    """Return the number of GPUs that this process may use: visible CUDA devices, or Apple's GPU."""
    if is_apple_silicon():
        return 1
    present = gpus()
    # NVML shows no AMD GPU, and a container may lack NVML.
    if not present and any(driver.exists() for driver in DRIVERS):
        import torch  # takes seconds

        return torch.cuda.device_count()
    if os.environ.get(VISIBLE, "").startswith("MIG-"):  # a process can use only one MIG device
        return min(len(present), 1)
    return len(visible(present))


def visible(present: list[Gpu]) -> list[Gpu]:
    """Return the GPUs that CUDA shows for ``CUDA_VISIBLE_DEVICES``.

    As in CUDA, the list ends at the first name that no GPU has, and is empty if a GPU occurs twice.
    """
    if (names := os.environ.get(VISIBLE)) is None:
        return present
    listed = list[Gpu]()
    for name in map(str.strip, names.split(",")):
        # CUDA accepts the beginning of a UUID if it is unique.
        by_uuid = [gpu for gpu in present if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        matches = [gpu for gpu in present if gpu.number == name] or by_uuid
        if len(matches) != 1:
            break
        listed += matches
    return listed if len({*listed}) == len(listed) else []


def candidates() -> list[Gpu]:
    """Return the GPUs that ``gpus=emptiest`` may choose: all, or those that CUDA shows.

    Raises:
        UserError: if there is no GPU, or the variable names one that does not exist.
    """
    present, names = gpus(), os.environ.get(VISIBLE)
    if not present:
        raise UserError("gpus=emptiest finds no GPU (nvidia-smi). Leave out gpus=emptiest.")
    listed = visible(present)
    if names is not None and len(listed) != len(names.split(",")):
        raise UserError(
            f"gpus=emptiest chooses among the GPUs of CUDA_VISIBLE_DEVICES={names}, which must be "
            "numbers or UUIDs of this machine's GPUs, each once.\nChange or unset "
            "CUDA_VISIBLE_DEVICES, or leave out gpus=emptiest."
        )
    return listed


def choose_emptiest(num_wanted: int | None, min_free_gib: float = 0) -> list[Gpu]:
    """Choose and lock the GPUs with the most free memory, and set ``CUDA_VISIBLE_DEVICES``.

    Args:
        num_wanted: number of GPUs; ``None`` chooses all that are free.
        min_free_gib: GiB of memory that must be free on each.

    Returns:
        The GPUs, starting with the one that has the most free memory.

    Raises:
        UserError: if there are too few; the message has the state of each GPU.
    """
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA ignores a later choice"
    release()  # an earlier choice in this process
    chosen, table = list[Gpu](), ""
    # Python's sort is stable: GPUs with equal free memory keep their order.
    for gpu in sorted(candidates(), key=lambda gpu: -gpu.free_bytes):
        state = gpu.problem or "free"
        if not gpu.problem and gpu.free_bytes < min_free_gib * 2**30:
            state = f"less free than gpus.min_free_gib={min_free_gib:g}"
        elif not gpu.problem and len(chosen) != num_wanted:
            if lock(gpu.uuid):
                chosen.append(gpu)
            else:
                state = "locked by another run"
        table += f"  GPU {gpu.number} {gpu.name}, {gib(gpu.free_bytes)} free: {state}\n"
    if len(chosen) < (num_wanted or 1):
        release()
        raise UserError(
            f"gpus=emptiest needs {num_wanted or 1} GPUs and found {len(chosen)}:\n{table}Use "
            "fewer trainer.devices or a smaller gpus.min_free_gib, or wait for other runs to end."
        )
    # NVML and CUDA may number the GPUs differently, so use UUIDs.
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in chosen)
    return chosen


def lock(name: str) -> bool:
    """Lock a GPU while this process runs; return ``False`` if another process has locked it."""
    bound = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        bound.bind(f"\0{PREFIX}{name}")
        locks[name] = bound
        return True
    bound.close()
    return False


def release() -> None:
    """Release all locks of this process.

    A forked data worker calls this as well, because it may outlive its parent process.
    """
    while locks:
        locks.popitem()[1].close()


os.register_at_fork(after_in_child=release)


def gib(num_bytes: float) -> str:
    """Return a number of bytes as a text in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"
