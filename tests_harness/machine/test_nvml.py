import pynvml
import pytest

from harness.machine import nvml
from tests_harness.machine.fake_nvml import GIB, FakeGpu, FakeNvml


def test_fake_has_the_names_and_numbers_of_the_library() -> None:
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 20
    for name in names:
        real = getattr(pynvml, name)
        if name.isupper():
            assert real == getattr(FakeNvml, name)


def test_gpu_is_described(machine) -> None:
    library = machine(FakeGpu(free=79.5), FakeGpu(free=3, name="NVIDIA T4"))
    first, second = nvml.gpus()
    assert (first.number, first.uuid, first.problem) == ("0", "GPU-00ab-cdef", "")
    assert (first.total_bytes, first.free_bytes) == (80 * GIB, 79.5 * GIB)
    assert second.name == "NVIDIA T4"
    assert library.num_open == 0


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver", ""),
        (FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded", "modprobe nvidia"),
        (FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "was updated", "Restart"),
        (FakeNvml.NVML_ERROR_UNKNOWN, "NVML error 999", "dmesg"),
    ],
)
def test_driver_that_does_not_answer_is_explained(error, reason, remedy, machine) -> None:
    machine(error=error)
    with pytest.raises(nvml.NoDriverError, match=reason) as caught:
        nvml.gpus()
    assert remedy in caught.value.remedy
    assert bool(remedy) == bool(caught.value.remedy)


def test_lost_gpu_does_not_hide_the_others(machine) -> None:
    machine(FakeGpu(free=80, lost=True), FakeGpu(free=80))
    lost, other = nvml.gpus()
    assert "NVML error 15" in lost.problem
    assert other.problem == ""


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (FakeGpu(free=80, compute_mode=FakeNvml.NVML_COMPUTEMODE_PROHIBITED), "prohibited"),
        (
            FakeGpu(free=80, compute_mode=FakeNvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, processes=1),
            "one process only",
        ),
        (
            FakeGpu(free=80, compute_mode=FakeNvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD, processes=1),
            "one process only",
        ),
        (FakeGpu(free=80, compute_mode=FakeNvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS), ""),
        (FakeGpu(free=80, processes=3), ""),
        (FakeGpu(free=80, mig=[]), "MIG is on"),
    ],
)
def test_gpu_on_which_nothing_can_start_says_why(gpu, problem, machine) -> None:
    machine(gpu)
    (found,) = nvml.gpus()
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)


def test_unknown_memory_is_no_error(machine) -> None:
    machine(FakeGpu(free=0, memory_unknown=True))
    assert nvml.gpus()[0].total_bytes == 0


@pytest.mark.gpu
def test_real_library_describes_the_first_gpu() -> None:
    import torch

    gpu = nvml.gpus()[0]
    assert gpu.uuid.startswith("GPU-")
    assert gpu.total_bytes >= torch.cuda.get_device_properties(0).total_memory * 0.9
    assert 0 < gpu.free_bytes <= gpu.total_bytes
