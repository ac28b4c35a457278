"""The GPUs and cores of this machine, as the driver and a container give them."""

import os
import platform
from pathlib import Path

import pynvml
import pytest

from harness import machine as choice
from harness.machine import gpus, num_gpus
from tests.machine.fake_nvml import GIB, FakeGpu, FakeNvml


def test_fake_has_the_names_and_numbers_of_the_library() -> None:
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real = getattr(pynvml, name)
        if name.isupper():
            assert real == getattr(FakeNvml, name)


def test_gpu_is_described_also_where_another_is_lost_or_has_no_memory_of_its_own(machine) -> None:
    library = machine(FakeGpu(79.5), FakeGpu(3, lost=True), FakeGpu(3, memory_unknown=True))
    first, lost, shared = gpus()
    assert (first.number, first.uuid, first.problem) == ("0", "GPU-00ab-cdef", "")
    assert (first.total_bytes, first.free_bytes) == (80 * GIB, 79.5 * GIB)
    assert "NVML error 15" in lost.problem
    assert (shared.uuid, "NVML error 3" in shared.problem) == ("GPU-22ab-cdef", True)
    assert library.num_open == 0


def test_gpus_are_counted_as_cuda_shows_them(machine, monkeypatch) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert num_gpus() == 0
    machine(*[FakeGpu(80)] * 3)
    assert num_gpus() == 3
    for value, num in (
        *(("", 0), ("-1", 0), ("2", 1), ("2, 0", 2), ("0,9,1", 1), ("1,-1", 1)),
        *(("GPU-11ab-cdef,GPU-00ab-cdef", 2), ("MIG-a,MIG-b", 1)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert num_gpus() == num, value
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert num_gpus() == 1


@pytest.mark.gpu
def test_real_library_describes_the_first_gpu() -> None:
    import torch

    gpu = gpus()[0]
    assert gpu.uuid.startswith("GPU-")
    assert gpu.total_bytes >= torch.cuda.get_device_properties(0).total_memory * 0.9
    assert 0 < gpu.free_bytes <= gpu.total_bytes


def test_cores_are_those_of_the_affinity_and_the_quota(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(choice, "GROUPS", tmp_path)
    for affinity, quota, expected in (
        (16, "max 100000\n", 16),
        (16, "350000 100000\n", 3),
        (16, "50000 100000", 1),
        (2, "800000 100000", 2),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=affinity: {*range(n)}, False)
        (tmp_path / "cpu.max").write_text(quota)
        assert choice.usable_cores() == expected, quota
    (tmp_path / "cpu.max").unlink()
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert choice.usable_cores() == 10
