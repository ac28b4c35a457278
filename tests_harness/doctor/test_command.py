"""The doctor as a person meets it."""

import importlib.util
import json
import re

import pytest

from harness.doctor import gpus, process_groups
from tests_harness.conftest import ROOT, command
from tests_harness.doctor.test_gpus import answer
from tests_harness.machine.fake_nvml import FakeGpu, FakeNvml

SCRIPT = ROOT / "scripts" / "doctor.py"


@pytest.fixture
def doctor():
    spec = importlib.util.spec_from_file_location("doctor", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def two_gpus(machine, own_locks, monkeypatch: pytest.MonkeyPatch):
    """A machine with two GPUs that work, as far as they can be played."""
    machine(FakeGpu(79.1), FakeGpu(78.0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(gpus, "ask_torch", lambda: answer("11ab-cdef"))
    monkeypatch.setattr(process_groups, "all_reduce_in_processes", lambda *_: "")


def test_this_machine_is_examined() -> None:
    result = command("scripts/doctor.py", "--json")
    seen = json.loads(result.stdout)
    assert result.returncode == bool(seen["problems"]), result.stderr
    assert seen["gloo"] == {"works": True}
    assert seen["versions"]["torch"]
    assert seen["cpu_cores"]["usable"] >= 1
    assert seen["recommended"][0].startswith("strategy=")
    assert {"gpus", "torch_on_gpus", "shared_memory", "disk", "nccl"} < set(seen)


@pytest.mark.usefixtures("two_gpus")
def test_screen_shows_gpus_and_one_line_to_paste(doctor, capsys, tmp_path) -> None:
    assert doctor.main(["--output-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100 + len(str(tmp_path))
    assert lines[:3] == [
        "GPUs           2 here, 1 visible with CUDA_VISIBLE_DEVICES=1",
        "  GPU 0    NVIDIA H100    79.1 GiB of   80.0 GiB free  hidden",
        "  GPU 1    NVIDIA H100    78.0 GiB of   80.0 GiB free  cuda:0",
    ]
    assert lines[-1].startswith("recommended    python train.py strategy=gpu trainer.devices=1 ")


@pytest.mark.usefixtures("two_gpus")
def test_json_maps_cuda_to_physical(doctor, capsys, tmp_path) -> None:
    doctor.main(["--json", "--output-dir", str(tmp_path)])
    seen = json.loads(capsys.readouterr().out)
    assert seen["cuda_to_physical"] == {"cuda:0": "1"}
    assert seen["gpus"]["there"][0]["free_bytes"] == int(79.1 * 2**30)


@pytest.mark.usefixtures("two_gpus")
def test_what_is_broken_is_told_and_is_the_exit_status(
    doctor, capsys, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "ask_torch", lambda: answer(cuda=None))
    assert doctor.main(["--output-dir", str(tmp_path)]) == 1
    screen = capsys.readouterr().out
    assert "BROKEN         this torch is built for CPUs" in screen
    assert "Install a build for this GPU" in screen
    assert "strategy=cpu" in screen


@pytest.mark.usefixtures("two_gpus")
def test_gpu_of_another_run_is_marked(doctor, capsys, tmp_path) -> None:
    from harness.machine import locks

    assert locks.acquire("GPU-00ab-cdef")
    doctor.main(["--output-dir", str(tmp_path)])
    assert "taken by the run of process" in capsys.readouterr().out


def test_unknown_option_is_status_2(doctor) -> None:
    with pytest.raises(SystemExit) as caught:
        doctor.main(["--nope"])
    assert caught.value.code == 2


@pytest.mark.usefixtures("own_locks")
def test_page_shows_the_screen_of_a_machine_without_gpus(doctor, machine, capsys, monkeypatch):
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(gpus, "ask_torch", lambda: answer(cuda=None))
    monkeypatch.setattr(process_groups, "all_reduce_in_processes", lambda *_: "")
    doctor.main([])
    seen = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(
        r"```\n(GPUs .*?)```", (ROOT / "docs" / "devices.md").read_text(), re.DOTALL
    )
    # What follows a name is of the machine.
    assert [line[:15] for line in shown.splitlines()] == [line[:15] for line in seen]
