import platform

import pytest
import torch

from harness.machine import nvml
from harness.machine.visible import num_gpus, visible
from tests_harness.machine.fake_nvml import FakeGpu, FakeNvml

FOUR = [FakeGpu(free=80, uuid=uuid) for uuid in ("GPU-aa11", "GPU-aa22", "GPU-bb11", "GPU-cc11-dd")]
# The value of CUDA_VISIBLE_DEVICES, what CUDA shows, and what is said.
CASES = [
    (None, "0123", ""),
    ("", "", ""),
    ("-1", "", ""),
    ("2", "2", ""),
    ("3,1", "31", ""),
    (" 3 , 1 ", "31", ""),
    ("03", "3", ""),
    ("0,9,1", "0", "'9' names no GPU"),
    ("9", "", "'9' names no GPU"),
    ("1,-1,2", "1", "'-1' names no GPU"),
    ("1,,2", "1", "'' names no GPU"),
    ("2x,1", "21", ""),
    ("all", "", "'all' names no GPU"),
    ("NoDevFiles", "", "'NoDevFiles' names no GPU"),
    ("1,1", "", "'1' is in it twice"),
    ("1,9,1", "", "'1' is in it twice"),
    ("GPU-cc11-dd,GPU-aa22", "31", ""),
    ("GPU-b,GPU-c", "23", ""),
    ("GPU-aa", "", "'GPU-aa' names no GPU"),  # which of two?
    ("GPU-bb,GPU-bb11", "", "twice"),
    ("GPU-bb,GPU-bb", "", "twice"),
    ("GPU-bb,GPU-zz,GPU-cc", "2", "'GPU-zz' names no GPU"),
    ("GPU-bb,1", "2", "'1' names no GPU"),
    ("1,GPU-bb", "1", "'GPU-bb' names no GPU"),
    ("gpu-bb11", "", "names no GPU"),
    ("MIG-00aa", "", "names no GPU"),
]


@pytest.mark.parametrize(("value", "shown", "said"), CASES)
def test_variable_is_read(value: str | None, shown: str, said: str, machine) -> None:
    machine(*FOUR)
    found, mistake = visible(nvml.gpus(), value)
    assert "".join(gpu.number for gpu in found) == shown
    assert said in mistake
    assert bool(said) == bool(mistake)


@pytest.mark.parametrize("value", [value for value, _, _ in CASES if value != "MIG-00aa"])
def test_torch_reads_the_variable_alike(
    value: str | None, machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch follows CUDA's rules; its private functions are asked, as there is no GPU here."""
    machine(*FOUR)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: [gpu.uuid for gpu in FOUR])
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    expected = 4 if value is None else torch.cuda._device_count_nvml()
    assert num_gpus() == expected


def test_mig_parts_are_shown_by_either_name(machine) -> None:
    machine(FakeGpu(free=80), FakeGpu(free=80, mig=[10, 10]))
    gpus = nvml.gpus()
    for value in ("MIG-11aa-part,MIG-10aa", "MIG-GPU-11ab-cdef/8/0,MIG-GPU-11ab-cdef/7/0"):
        shown, mistake = visible(gpus, value)
        assert [part.number for part in shown] == ["1:1", "1:0"]
        assert mistake == ""


def test_process_has_one_mig_part_at_most(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeGpu(free=80, mig=[10, 10]))
    assert num_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-00,MIG-01")
    assert num_gpus() == 1


def test_no_driver_is_no_gpu(machine) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert num_gpus() == 0


def test_apple_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert num_gpus() == 1


@pytest.mark.gpu
def test_count_is_that_of_cuda() -> None:
    assert num_gpus() == torch.cuda.device_count()
