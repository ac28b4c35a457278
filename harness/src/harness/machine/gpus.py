"""List the GPUs of this machine by NVIDIA's management library, without starting CUDA or torch."""

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

MIG = "MIG is on: name its device in CUDA_VISIBLE_DEVICES, without gpus=emptiest"


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    number: str  # as nvidia-smi counts
    uuid: str = ""  # for CUDA_VISIBLE_DEVICES; empty where it does not answer
    name: str = "unknown"
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""  # why no run can start on it; empty if one can


def gpus() -> list[Gpu]:
    """Return all GPUs of this machine, in the order of their PCI bus ids; none without a driver."""
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

    uuid, name, problem = "", "unknown", ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        with suppress(nvml.NVMLError):  # most GPUs know no MIG
            if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                problem = MIG
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:  # lost, not for this user, or without memory of its own
        return Gpu(str(index), uuid, name, problem=str(error))
    return Gpu(str(index), uuid, name, int(memory.total), int(memory.free), problem)


def num_gpus() -> int:
    """Count the GPUs that this process may use: visible CUDA devices, or Apple's one."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return 1
    present, visible = gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    if visible.startswith("MIG-"):  # CUDA shows one of them to a process
        return min(len(present), 1)
    names = {gpu.number for gpu in present} | {gpu.uuid for gpu in present} - {""}
    return len([*takewhile(names.__contains__, map(str.strip, visible.split(",")))])


def gib(num_bytes: float) -> str:
    """Write bytes in the unit that nvidia-smi counts in."""
    return f"{num_bytes / 2**30:.1f} GiB"
