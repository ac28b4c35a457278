"""A machine with the GPUs of a test, behind the functions of pynvml that the project calls.

In this process it takes pynvml's place in ``sys.modules``; for a command, ``write_fake`` makes a
folder for PYTHONPATH.
"""
# ruff: noqa: N802  (the library's names)

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

GIB = 2**30


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """A GPU, which knows MIG if it is split by it."""

    free: float
    total: float = 80.0
    name: str = "NVIDIA H100"
    is_split: bool = False
    lost: bool = False
    memory_unknown: bool = False
    busy: int = 0  # percent


@dataclass
class FakeNvml:
    """The library; ``error`` is what its initialisation answers."""

    gpus: list[FakeGpu] = field(default_factory=list)
    error: int = 0
    num_open: int = 0

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
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
        return index

    def nvmlDeviceGetUUID(self, index):
        return f"GPU-{index}{index}ab-cdef"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.num_open, "the library is not open"
        uuids = [self.nvmlDeviceGetUUID(index) for index in range(len(self.gpus))]
        return self.nvmlDeviceGetHandleByIndex(uuids.index(uuid))

    def nvmlDeviceGetUtilizationRates(self, index):
        self.nvmlDeviceGetHandleByIndex(index)
        return SimpleNamespace(gpu=self.gpus[index].busy)

    def nvmlDeviceGetName(self, index):
        return self.gpus[index].name

    def nvmlDeviceGetMemoryInfo(self, index):
        gpu = self.gpus[index]
        if gpu.memory_unknown:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        total, free = int(gpu.total * GIB), int(gpu.free * GIB)
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetMigMode(self, index):
        if not self.gpus[index].is_split:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [self.NVML_DEVICE_MIG_ENABLE, 0]


def write_fake(folder: Path, gpus: list[FakeGpu]) -> dict[str, str]:
    """Give commands these GPUs: the variables to start them with."""
    folder.mkdir(exist_ok=True)
    (folder / "pynvml.py").write_text(
        "import sys\n"
        f"sys.path.append({str(Path(__file__).parents[2])!r})\n"
        "from tests.devices.fake_nvml import FakeGpu, FakeNvml\n"
        f"gpus = {[asdict(gpu) for gpu in gpus]!r}\n"
        "fake = sys.modules[__name__] = FakeNvml([FakeGpu(**gpu) for gpu in gpus])\n"
        # Locks are the machine's: another test that runs meanwhile has other GPUs.
        f"fake.nvmlDeviceGetUUID = lambda i: f'GPU-{{i}}{{i}}ab-{crc32(bytes(folder)):x}'\n"
    )
    visible = ",".join(map(str, range(len(gpus))))  # the tests themselves see none
    paths = ":".join([str(folder), *filter(None, sys.path)])
    return {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": visible}
