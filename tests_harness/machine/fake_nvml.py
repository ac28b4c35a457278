"""A machine with the GPUs of a test, behind the functions of pynvml that the project calls.

In this process it takes pynvml's place in ``sys.modules``; for a command, ``write_fake`` makes a
folder for PYTHONPATH.
"""
# ruff: noqa: N802  (the library's names)

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

GIB = 2**30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """A GPU; ``mig`` is the free GiB of each of its MIG devices, ``None`` where MIG is off."""

    free: float
    total: float = 80.0
    name: str = "NVIDIA H100"
    compute_mode: int = 0
    processes: int = 0
    mig: list[float] | None = None
    lost: bool = False
    memory_unknown: bool = False
    uuid: str = ""


@dataclass
class FakeNvml:
    """The library; ``error`` is what its initialisation answers."""

    gpus: list[FakeGpu] = field(default_factory=list)
    error: int = 0
    num_open: int = 0

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_ERROR_UNKNOWN = 999
    NVML_COMPUTEMODE_EXCLUSIVE_THREAD = 1
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    NVML_DEVICE_MIG_ENABLE = 1

    def nvmlInit(self):
        if self.error:
            raise NVMLError(self.error)
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlDeviceGetCount(self):
        assert self.num_open, "the library is not open"
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.gpus[index].lost:
            raise NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return (index, None)

    def nvmlDeviceGetUUID(self, handle):
        index, part = handle
        if part is not None:
            return f"MIG-{index}{part}aa-part"
        return self.gpus[index].uuid or f"GPU-{index}{index}ab-cdef"

    def nvmlDeviceGetName(self, handle):
        return self.gpus[handle[0]].name + ("" if handle[1] is None else " MIG 1g.10gb")

    def nvmlDeviceGetMemoryInfo(self, handle):
        gpu = self.gpus[handle[0]]
        if gpu.memory_unknown:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        free = gpu.free if handle[1] is None else gpu.mig[handle[1]]
        total = gpu.total if handle[1] is None else 10
        return SimpleNamespace(total=int(total * GIB), free=int(free * GIB))

    def nvmlDeviceGetMigMode(self, handle):
        if "H100" not in self.gpus[handle[0]].name:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [int(self.gpus[handle[0]].mig is not None), 0]

    def nvmlDeviceGetComputeMode(self, handle):
        return self.gpus[handle[0]].compute_mode

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=1)] * self.gpus[handle[0]].processes


def write_fake(folder: Path, gpus: list[FakeGpu]) -> dict[str, str]:
    """Give commands these GPUs: the variables to start them with."""
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(
        "import sys\n"
        f"sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from tests_harness.machine.fake_nvml import FakeGpu, FakeNvml\n"
        f"gpus = {[asdict(gpu) for gpu in gpus]!r}\n"
        "sys.modules[__name__] = FakeNvml([FakeGpu(**gpu) for gpu in gpus])\n"
    )
    return {"PYTHONPATH": ":".join([str(folder), *filter(None, sys.path)])}
