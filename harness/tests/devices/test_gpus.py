"""The GPUs and cores of this machine, as the driver and a container give them."""

import os
import platform
from pathlib import Path

import pynvml
import pytest
import torch

from harness import devices as choice
from harness.command.check import check
from harness.command.compose import compose_command
from harness.devices import gpus, num_gpus
from harness.testing import command as typed
from tests.devices.fake_nvml import GIB, FakeGpu, FakeNvml, write_fake
from tests.refusals import refusal


def test_fake_has_the_names_and_numbers_of_the_library() -> None:
    names = [name for name in vars(FakeNvml) if name.lower().startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real = getattr(pynvml, name)
        if name.isupper():
            assert real == getattr(FakeNvml, name)


def test_tests_that_are_not_marked_gpu_see_none() -> None:
    """``pytest_configure`` of harness.testing."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert num_gpus() == torch.cuda.device_count() == 0


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
        # The beginning of a UUID names a GPU if it is that of one alone; a GPU named twice, none.
        *(("GPU-1,GPU-00", 2), ("GPU-", 0), ("GPU-0,GPU-", 1), ("0,0", 0), ("GPU-1,1", 0)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert num_gpus() == num, value
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert num_gpus() == 1


def test_without_nvml_torch_counts_the_gpus_of_amd(machine, tmp_path: Path, monkeypatch) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(choice, "DRIVERS", ())
    assert num_gpus() == 0
    monkeypatch.setattr(choice, "DRIVERS", (tmp_path,))
    assert num_gpus() == 2
    check(compose_command("train", ["strategy=ddp", "model=mlp"]))
    check(compose_command("train", ["trainer.devices=[1]", "model=mlp"]))
    assert "this run sees 2 GPUs: numbers 0 to 1" in refusal("model=mlp", "trainer.devices=3")


def test_gpus_that_are_not_there_are_refused_before_anything_is_made(
    machine, tmp_path: Path, monkeypatch
) -> None:
    machine(FakeGpu(80), FakeGpu(80))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    sees = "but this run sees 1 GPU (of CUDA_VISIBLE_DEVICES=1): number 0.\nUse "
    one, listed = "trainer.devices=1 or less, or trainer.acc", "a list of these numbers, each once"
    for words, instead in (
        *(
            ((f"strategy={name}", "trainer.devices=2"), one)
            for name in ("ddp", "dp", "ddp2", "fsdp")
        ),
        *(((f"trainer.devices={numbers}",), listed) for numbers in ("[1]", "[0,1]", "[0,0]", "[]")),
        (("trainer.devices=[-1]",), listed),
        (("trainer.devices=[true]",), listed),
        (("trainer.devices={a:1}",), one),
        (("strategy=gpu", "trainer.devices=2", "gpus=emptiest"), one),
    ):
        said = refusal("model=mlp", f"output_dir={tmp_path}", *words)
        assert sees + instead in said, words
    assert not [*tmp_path.iterdir()]
    for words in ("strategy=ddp", "strategy=gpu", "trainer.devices=[0]", "strategy=dp"):
        check(compose_command("train", ["model=mlp", words]))
    check(
        compose_command("train", ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"])
    )


def test_a_sweep_over_the_number_of_gpus_is_refused(machine, tmp_path: Path) -> None:
    machine(FakeGpu(80), FakeGpu(80))
    words = ("-m", "model=mlp", "strategy=ddp", "trainer.devices=1,2", f"output_dir={tmp_path}")
    assert "Give trainer.devices one value" in refusal(*words)
    assert not [*tmp_path.iterdir()]


def test_gpus_are_counted_before_torch_is_imported(tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    variables = write_fake(fake, [FakeGpu(80)])
    (fake / "torch.py").write_text("raise SystemExit('torch was imported')")
    words = "strategy=ddp", "trainer.devices=2", f"output_dir={tmp_path / 'out'}"
    result = typed("train.py", *words, environment=variables)
    sees = "trainer.devices=2, but this run sees 1 GPU (of CUDA_VISIBLE_DEVICES=0): number 0.\nUse "
    assert result.stderr.startswith(sees)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 2)
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_real_library_describes_the_first_gpu() -> None:
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
