"""Which GPU is cuda:0, and whether this torch can compute on it."""

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.doctor import gpus as this
from tests_harness.machine.fake_nvml import FakeGpu, FakeNvml


def answer(*devices: str | tuple[str, str], cuda: str | None = "12.8", error: str = "") -> Any:
    """What ``probe`` would say: UUIDs, with the error of those that do not compute."""
    pairs = [device if isinstance(device, tuple) else (device, "") for device in devices]
    return {
        "torch": "2.13.0",
        "cuda": cuda,
        "mps": False,
        "error": error,
        "devices": [{"name": "NVIDIA H100", "uuid": u, "error": e} for u, e in pairs],
    }


def look(probe: Any) -> tuple[Any, dict[int, str]]:
    _, there, shown = this.gpus()
    section, places, working = this.torch_on_gpus(there, shown, probe)
    return section, {index: places[index].number for index in working}


def test_no_driver_is_told_and_is_nothing_broken(machine) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    section, there, shown = this.gpus()
    assert section.text == "none: no NVIDIA driver is installed here"
    assert (there, shown, section.problems) == ([], [], [])
    section, working = look(answer(cuda=None))
    assert (section.problems, working) == ([], {})


def test_driver_that_is_broken_is_a_problem(machine) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    (problem,) = this.gpus()[0].problems
    assert problem.remedy == "Restart the machine."


def test_visible_gpus_are_told(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(FakeGpu(80), FakeGpu(70), FakeGpu(60))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    section, there, shown = this.gpus()
    assert section.text == "3 here, 2 visible with CUDA_VISIBLE_DEVICES=2,0"
    assert [gpu.number for gpu in shown] == ["2", "0"]
    assert len(there) == 3
    assert section.values["there"][1]["free_bytes"] == 70 * 2**30
    json.dumps(section.values)


def test_variable_that_names_no_gpu_is_a_problem(machine, monkeypatch) -> None:
    machine(FakeGpu(80), FakeGpu(70))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    (problem,) = this.gpus()[0].problems
    assert "'7' names no GPU" in problem.what
    assert "nvidia-smi -L" in problem.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this.gpus()[0].problems == []  # hides them on purpose


def test_lost_gpu_is_a_problem_and_a_prohibited_one_is_none(machine) -> None:
    machine(FakeGpu(80, lost=True), FakeGpu(80, compute_mode=FakeNvml.NVML_COMPUTEMODE_PROHIBITED))
    (problem,) = this.gpus()[0].problems
    assert "GPU 0 does not answer" in problem.what


def test_torch_that_computes_is_well(machine) -> None:
    machine(FakeGpu(80), FakeGpu(70))
    section, working = look(answer("00ab-cdef", "11ab-cdef"))
    assert section.problems == []
    assert section.text == "torch is built for CUDA 12.8; computes on cuda:0, cuda:1"
    assert working == {0: "0", 1: "1"}


def test_cuda_s_own_order_counts(machine, monkeypatch) -> None:
    """Without CUDA_DEVICE_ORDER the fastest GPU is cuda:0, wherever it sits."""
    machine(FakeGpu(15, name="NVIDIA T4"), FakeGpu(80), FakeGpu(80))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    _, working = look(answer("11ab-cdef", "22ab-cdef"))
    assert working == {0: "1", 1: "2"}


def test_torch_for_cpus_beside_a_gpu_is_a_problem(machine) -> None:
    machine(FakeGpu(80))
    section, working = look(answer(cuda=None))
    (problem,) = section.problems
    assert "leaves the GPUs idle" in problem.what
    assert working == {}


def test_cuda_that_does_not_start_is_a_problem(machine) -> None:
    machine(FakeGpu(80))
    (problem,) = look(answer(error="The NVIDIA driver is too old"))[0].problems
    assert "The NVIDIA driver is too old" in problem.what
    assert "nvidia-smi" in problem.remedy
    (problem,) = look(answer())[0].problems
    assert "it finds no GPU" in problem.what


def test_gpu_that_torch_has_no_code_for_is_named(machine) -> None:
    machine(FakeGpu(80), FakeGpu(80))
    section, working = look(answer("00ab-cdef", ("11ab-cdef", "no kernel image is available")))
    (problem,) = section.problems
    assert "cuda:1 (NVIDIA H100): no kernel image" in problem.what
    assert working == {0: "0"}


def test_busy_gpus_are_not_broken(machine) -> None:
    exclusive = FakeNvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    machine(FakeGpu(80), FakeGpu(0.1), FakeGpu(80, compute_mode=exclusive, processes=1))
    busy = ("11ab-cdef", "CUDA error: out of memory"), ("22ab-cdef", "busy or unavailable")
    section, working = look(answer("00ab-cdef", *busy))
    assert section.problems == []
    assert "cuda:1 is busy; cuda:2 is busy" in section.text
    assert working == {0: "0"}


def test_mig_part_stands_at_its_place(machine) -> None:
    machine(FakeGpu(80, mig=[9, 8]))
    assert look(answer("another-name"))[1] == {0: "0:0"}


def test_apple_s_gpu_is_told(machine) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert look(answer(cuda=None) | {"mps": True})[0].text == "torch uses Apple's GPU"


def crashes() -> None:
    os._exit(1)


def is_broken() -> None:
    raise ImportError("libcudart.so: cannot open shared object file")


@pytest.mark.parametrize(
    ("probe", "seconds", "said"),
    [(crashes, 3.0, "no answer after 3 seconds"), (is_broken, 120.0, "libcudart.so")],
)
def test_torch_that_does_not_answer_is_a_problem(
    probe, seconds, said, machine, monkeypatch
) -> None:
    monkeypatch.setattr(this, "probe", probe)
    monkeypatch.setattr(this, "PROBE_SECONDS", seconds)
    machine(FakeGpu(80))
    section, working = look(this.ask_torch())
    assert said in section.problems[0].what
    assert working == {}


def fake_cuda(monkeypatch: pytest.MonkeyPatch, product) -> None:
    """Let the probe find one GPU, whose tensors are on the CPU."""
    properties = SimpleNamespace(name="NVIDIA H100", uuid="00ab-cdef")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: product(torch.zeros(shape) + 1))


def test_probe_computes_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, lambda ones: ones)
    report = this.probe()
    assert report["devices"] == [{"name": "NVIDIA H100", "uuid": "00ab-cdef", "error": ""}]
    assert (report["cuda"], report["error"]) == ("12.8", "")


def test_probe_tells_wrong_results_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, lambda ones: ones.mul_(2))
    assert "comes out wrong" in this.probe()["devices"][0]["error"]

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: no kernel image\nCompile with ...")

    fake_cuda(monkeypatch, fail)
    assert this.probe()["devices"][0]["error"] == "CUDA error: no kernel image"

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert this.probe()["error"] == "The NVIDIA driver on your system is too old"


@pytest.mark.gpu
def test_real_gpu_computes() -> None:
    section, working = look(this.ask_torch())
    assert section.problems == []
    assert len(working) == torch.cuda.device_count()
