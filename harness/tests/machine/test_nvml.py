import pynvml
import pytest

from harness.machine import nvml
from tests.machine.fake_nvml import GIB, FakeGpu, FakeNvml


def test_fake_has_the_names_and_numbers_of_the_library() -> None:
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real = getattr(pynvml, name)
        if name.isupper():
            assert real == getattr(FakeNvml, name)


def test_gpu_is_described_also_where_another_is_lost_or_tells_no_memory(machine) -> None:
    library = machine(
        FakeGpu(free=79.5),
        FakeGpu(free=3, lost=True),
        FakeGpu(free=3, memory_unknown=True, is_split=None),
    )
    first, lost, last = nvml.gpus()
    assert (first.number, first.uuid, first.problem) == ("0", "GPU-00ab-cdef", "")
    assert (first.name, first.total_bytes, first.free_bytes) == (
        "NVIDIA H100",
        80 * GIB,
        79.5 * GIB,
    )
    assert "NVML error 15" in lost.problem
    assert (last.number, last.total_bytes, last.problem) == ("2", 0, "")
    assert library.num_open == 0


@pytest.mark.gpu
def test_real_library_describes_the_first_gpu() -> None:
    import torch

    gpu = nvml.gpus()[0]
    assert gpu.uuid.startswith("GPU-")
    assert gpu.total_bytes >= torch.cuda.get_device_properties(0).total_memory * 0.9
    assert 0 < gpu.free_bytes <= gpu.total_bytes
