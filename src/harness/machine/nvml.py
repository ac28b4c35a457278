"""What NVIDIA's management library (NVML) says of the GPUs, without starting CUDA or torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """A GPU."""

    number: str  # as nvidia-smi counts
    uuid: str  # for CUDA_VISIBLE_DEVICES; empty where it does not answer
    name: str
    total_bytes: int = 0  # 0 where NVML cannot tell, as of memory shared with the CPU
    free_bytes: int = 0
    problem: str = ""  # why no run can start on it; empty if one can

    def is_called(self, name: str) -> bool:
        """Whether a name in ``CUDA_VISIBLE_DEVICES`` is its number or its UUID."""
        return name in (self.number, self.uuid) if name else False


class NoDriverError(Exception):
    """NVML does not answer; ``remedy`` is empty where there is nothing to repair."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def gib(num_bytes: float) -> str:
    """Bytes, in the unit that nvidia-smi counts in."""
    return f"{num_bytes / 2**30:.1f} GiB"


def gpus() -> list[Gpu]:
    """All GPUs of this machine, in the order of their PCI bus ids.

    Raises:
        NoDriverError: where there is no driver, or a broken one.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        remedies = {
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("no NVIDIA driver is installed here", ""),
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
                "an NVIDIA driver is installed, but not loaded",
                "Load it with `sudo modprobe nvidia`, or restart the machine; give a container "
                "its GPUs with `docker run --gpus all`.",
            ),
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
                "the NVIDIA driver was updated while the old one is still loaded",
                "Restart the machine.",
            ),
        }
        unknown = f"the NVIDIA driver does not answer: {error}", "Look at `sudo dmesg | grep nv`."
        raise NoDriverError(*remedies.get(error.value, unknown)) from error
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        memory, problem = _memory(nvml, handle), _problem(nvml, handle)
    except nvml.NVMLError as error:  # the GPU has fallen off the bus, or is not for this user
        return Gpu(str(index), "", "unknown", problem=str(error))
    return Gpu(str(index), uuid, name, *memory, problem)


def _problem(nvml: Any, handle: Any) -> str:
    mig = _supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE:
        return "MIG is on: name its device in CUDA_VISIBLE_DEVICES, without gpus=emptiest"
    mode = _supported(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return "computing is prohibited on it"
    exclusive = (nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD)
    if mode in exclusive and nvml.nvmlDeviceGetComputeRunningProcesses(handle):
        return "in use, and for one process only"
    return ""


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    memory = _supported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return (0, 0) if memory is None else (int(memory.total), int(memory.free))


def _supported(nvml: Any, question: Callable[[Any], Any], handle: Any) -> Any:
    """The answer, or ``None`` from a GPU that does not know the question."""
    try:
        return question(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise
