"""Count this machine's cores and GPUs, and choose the emptiest GPUs. Starts neither CUDA nor torch.

In: how many are wanted, and what must be free. Out: ``CUDA_VISIBLE_DEVICES``, which further ranks
inherit. Chosen GPUs are locked against other runs that choose: a lock is a bound name in Linux's
abstract socket namespace, which all users share, and which the system frees when a process ends.
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
GROUPS = Path("/sys/fs/cgroup")  # a container's own group is the root of all groups
MIG = "MIG is on: name its device in CUDA_VISIBLE_DEVICES, without gpus=emptiest"
PREFIX = "train_"  # of the locks' names
locks: dict[str, socket.socket] = {}  # that this process holds, by the UUID of the GPU


def usable_cores() -> int:
    """Return this process's cores: its affinity, or its container's quota rounded down."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError):  # not Linux, version 1 of control groups, or not for this user
        quota, period = (GROUPS / "cpu.max").read_text().split()  # in microseconds
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


@dataclass(eq=False)
class Gpu:
    """A GPU."""

    number: str  # as nvidia-smi counts
    uuid: str = ""  # for CUDA_VISIBLE_DEVICES; empty where it does not answer
    name: str = "unknown"
    total_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""  # why no run can start on it; empty if one can


def gpus() -> list[Gpu]:
    """Return all GPUs, in the order of their PCI bus ids; none without a driver."""
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
        with suppress(nvml.NVMLError):  # most GPUs know no MIG
            if nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
                gpu.problem = MIG
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        gpu.total_bytes, gpu.free_bytes = int(memory.total), int(memory.free)
    except nvml.NVMLError as error:  # lost, not for this user, or without memory of its own
        gpu.problem = str(error)
    return gpu


def is_apple_silicon() -> bool:
    """Return whether this machine's GPU is Apple's own, which torch calls mps."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def num_gpus() -> int:
    """Count the GPUs that this process may use: visible CUDA devices, or Apple's one."""
    if is_apple_silicon():
        return 1
    present = gpus()
    # NVML is NVIDIA's, and a container may lack it.
    if not present and any(driver.exists() for driver in DRIVERS):
        import torch  # seconds

        return torch.cuda.device_count()
    if os.environ.get(VISIBLE, "").startswith("MIG-"):  # CUDA shows one of them to a process
        return min(len(present), 1)
    return len(visible(present))


def visible(present: list[Gpu]) -> list[Gpu]:
    """Return the GPUs that CUDA shows: up to the first name that is none, each named once."""
    if (names := os.environ.get(VISIBLE)) is None:
        return present
    shown = list[Gpu]()
    for name in map(str.strip, names.split(",")):
        # CUDA takes the beginning of a UUID as well, where it is that of one GPU alone.
        begins = [gpu for gpu in present if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        named = [gpu for gpu in present if gpu.number == name] or begins
        if len(named) != 1:
            break
        shown += named
    return shown if len({*shown}) == len(shown) else []


def candidates() -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to choose among; a UserError if none."""
    present, names = gpus(), os.environ.get(VISIBLE)
    if not present:
        raise UserError("gpus=emptiest finds no GPU (nvidia-smi). Leave out gpus=emptiest.")
    shown = visible(present)
    if names is not None and len(shown) != len(names.split(",")):
        raise UserError(
            f"gpus=emptiest chooses among the GPUs of CUDA_VISIBLE_DEVICES={names}, which must "
            "be numbers or UUIDs of this machine, each once.\n"
            "Change or unset it, or leave out gpus=emptiest."
        )
    return shown


def choose_emptiest(num_wanted: int | None, min_free_gib: float = 0) -> list[Gpu]:
    """Choose and lock GPUs, by default all that are free; let CUDA see these, the emptiest first.

    Raises:
        UserError: if there are not enough; the message shows what each GPU lacks.
    """
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "CUDA will see no other GPUs"
    release()  # of an earlier choice in this process
    chosen, table = list[Gpu](), ""
    # Python's sort is stable: equally empty GPUs keep their order.
    for gpu in sorted(candidates(), key=lambda gpu: -gpu.free_bytes):
        state = gpu.problem or "free"
        if not gpu.problem and gpu.free_bytes < min_free_gib * 2**30:
            state = f"less free than gpus.min_free_gib={min_free_gib:g}"
        elif not gpu.problem and len(chosen) != num_wanted:
            if lock(gpu.uuid):
                chosen.append(gpu)
            else:
                state = "taken by another run"
        table += f"  GPU {gpu.number} {gpu.name}, {gib(gpu.free_bytes)} free: {state}\n"
    if len(chosen) < (num_wanted or 1):
        release()
        raise UserError(
            f"gpus=emptiest looked for {num_wanted or 1} and found {len(chosen)}:\n{table}Use "
            "fewer trainer.devices or a smaller gpus.min_free_gib, or wait for other runs to end."
        )
    # Unlike numbers, UUIDs mean the same to NVML and CUDA in any order of devices.
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in chosen)
    return chosen


def lock(name: str) -> bool:
    """Lock a GPU for as long as this process runs; ``False`` if another process has it."""
    held = socket.socket(socket.AF_UNIX)
    with suppress(OSError):
        held.bind(f"\0{PREFIX}{name}")
        locks[name] = held
        return True
    held.close()
    return False


def release() -> None:
    """Give all GPUs back; in a forked data worker, which may live longer than its process, too."""
    while locks:
        locks.popitem()[1].close()


os.register_at_fork(after_in_child=release)


def gib(num_bytes: float) -> str:
    """Write bytes in the unit that nvidia-smi counts in."""
    return f"{num_bytes / 2**30:.1f} GiB"
