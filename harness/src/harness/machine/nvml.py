"""What NVIDIA's management library (NVML) says of the GPUs, without starting CUDA or torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MIG = "MIG is on: name its device in CUDA_VISIBLE_DEVICES, without gpus=emptiest"


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
    """NVML does not answer."""


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
        if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            raise NoDriverError("no NVIDIA driver is installed here") from error
        raise NoDriverError(f"its driver does not answer, see nvidia-smi: {error}") from error
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        memory = _supported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        mig = _supported(nvml, nvml.nvmlDeviceGetMigMode, handle)
    except nvml.NVMLError as error:  # the GPU has fallen off the bus, or is not for this user
        return Gpu(str(index), "", "unknown", problem=str(error))
    total, free = (0, 0) if memory is None else (int(memory.total), int(memory.free))
    is_split = mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return Gpu(str(index), uuid, name, total, free, MIG if is_split else "")


def _supported(nvml: Any, question: Callable[[Any], Any], handle: Any) -> Any:
    """The answer, or ``None`` from a GPU that does not know the question."""
    try:
        return question(handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise
