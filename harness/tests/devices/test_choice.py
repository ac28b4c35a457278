"""gpus=emptiest, against machines with the GPUs that a test needs; each belongs to one process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from harness import devices as choice
from harness.command.check import check
from harness.command.compose import compose_command
from harness.devices import MIG
from harness.errors import UserError
from harness.testing import command as typed
from tests.devices.fake_nvml import FakeGpu, FakeNvml, write_fake
from tests.faults.fork_server import command

pytestmark = pytest.mark.usefixtures("own_locks")


def chosen(num_wanted: int | None, min_free_gib: float = 0) -> str:
    """The numbers of the GPUs, which CUDA must see in this order."""
    found = choice.choose_emptiest(num_wanted, min_free_gib)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in found)
    return ",".join(gpu.number for gpu in found)


def test_emptiest_come_first_and_of_equals_the_first(machine, monkeypatch) -> None:
    for free, wanted, least, expected in (
        ((10, 70, 5, 80), 2, 0, "3,1"),
        ((40, 80, 80, 80), 2, 0, "1,2"),
        ((10, 70, 60), None, 20.5, "1,2"),
        ((20, 19.9), None, 20, "0"),
    ):
        machine(*map(FakeGpu, free))
        assert chosen(wanted, least) == expected
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


def test_choice_is_among_those_that_are_visible(machine, monkeypatch) -> None:
    machine(*(FakeGpu(free) for free in (20, 80, 70, 80)))
    for value in ("0,2", "GPU-00ab-cdef,GPU-22ab-cdef", "GPU-0,GPU-22"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert chosen(2) == "2,0"
    for value in ("", "-1", "9", "1,1", "1,x", "GPU-", "MIG-00aa", "2x"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={value}, which must be"):
            choice.choose_emptiest(1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == value


HOLD = """
import os, sys, time
from harness import devices as choice
choice.PREFIX = sys.argv[1]
taken = choice.lock(sys.argv[2])
if not os.fork():  # as a data worker, which speaks when it has closed what it inherited
    print(f"{taken} {os.getpid()}", flush=True)
time.sleep(60)
"""


@contextmanager
def holder(name: str, prefix: str) -> Iterator[int]:
    """Another process that has a lock, with a forked one, which lives as long as the block."""
    program = [sys.executable, "-c", HOLD, prefix, name]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        taken, worker = process.stdout.readline().split()
        assert taken == "True"
        try:
            yield process.pid
        finally:
            os.kill(int(worker), signal.SIGKILL)
            process.kill()


def test_gpu_is_held_by_one_process_until_it_is_killed_and_not_by_its_workers(own_locks) -> None:
    with holder("GPU-1", own_locks) as pid:
        assert not choice.lock("GPU-1")
        assert choice.lock("GPU-2")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert choice.lock("GPU-1")
        assert not choice.lock("GPU-1")
        choice.release()
        assert choice.lock("GPU-1")


def test_too_few_gpus_show_what_each_lacks(machine, monkeypatch, own_locks: str) -> None:
    frees = (79.1, 3.2, 79, 78)
    machine(*(FakeGpu(free, name="T4") for free in frees), FakeGpu(80, name="T4", is_split=True))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,4")
    with holder("GPU-22ab-cdef", own_locks), pytest.raises(UserError) as caught:
        choice.choose_emptiest(2, 20)
    says = str(caught.value)
    for line in (
        "gpus=emptiest needs 2 GPUs and found 1:",
        f"GPU 4 T4, 80.0 GiB free: {MIG}",
        "GPU 0 T4, 79.1 GiB free: free",
        "GPU 2 T4, 79.0 GiB free: locked by another run",
        "GPU 1 T4, 3.2 GiB free: less free than gpus.min_free_gib=20",
    ):
        assert line in says
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,4"
    assert choice.locks == {}


def test_machine_without_gpus_or_driver_is_told(machine) -> None:
    for error in (0, FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND):
        machine(error=error)
        with pytest.raises(UserError, match=r"finds no GPU(.|\n)*Leave out gpus=emptiest"):
            choice.candidates()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Let commands find four GPUs. torch knows that there are none, and computes on the CPU."""
    os.environ |= write_fake(tmp_path / "fake", [FakeGpu(free) for free in (10, 70, 5, 80)])
    os.environ["NOTES"] = str(tmp_path)
    model = ["model=mlp", "model.net._target_=tests.workers.noting.Noting"]
    place = f"output_dir={tmp_path / 'out'}"
    return ["train.py", *model, "trainer.fast_dev_run=true", "gpus=emptiest", place]


@pytest.mark.ci
def test_ddp_processes_that_start_early_are_the_run_and_inherit_the_choice(
    words: list[str], tmp_path: Path
) -> None:
    """They import at the same time as rank 0, and wait for its signal."""
    result = typed(*words, "strategy=ddp", "trainer.devices=2")
    assert result.returncode == 0, result.stderr
    # Lightning gives the port to those that it starts, or takes for those.
    assert json.loads((tmp_path / "1.json").read_text())["MASTER_PORT"].isdigit()
    assert "DDPStrategy, 2 processes" in result.stdout
    for rank in range(2):
        visible = json.loads((tmp_path / f"{rank}.json").read_text())["CUDA_VISIBLE_DEVICES"]
        assert [uuid[4] for uuid in visible.split(",")] == ["3", "1"]
    assert result.stdout.count("cuda:") == 2  # one process chose, and printed its choice
    assert "cuda:0 is GPU 3: NVIDIA H100, 80.0 GiB of 80.0 GiB free" in result.stdout
    assert "cuda:1 is GPU 1" in result.stdout


def test_choice_comes_before_torch_and_leaves_nothing_where_it_cannot_be_made(
    words: list[str], tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "fake" / "torch.py").write_text("raise SystemExit('torch was imported')")
    result = typed(*words, "trainer.devices=2")
    assert "cuda:1 is GPU 1" in result.stdout
    assert "torch was imported" in result.stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    result = typed(*words[:-1], f"output_dir={tmp_path / 'refused'}", "gpus.min_free_gib=20")
    assert (result.returncode, "torch" in result.stderr) == (1, False)
    assert "less free than gpus.min_free_gib=20" in result.stderr
    assert "Traceback" not in result.stderr
    assert not [*tmp_path.glob("refused/**/config.yaml")]


def test_choice_that_each_process_would_make_is_refused(machine, monkeypatch) -> None:
    """Those of torchrun and srun, which start several on a machine; one may choose."""
    machine(FakeGpu(80))
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}
    for variables, is_refused in (
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        (torchrun | {"LOCAL_WORLD_SIZE": "2"}, True),
        (torchrun | {"GROUP_WORLD_SIZE": "2"}, False),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            composed = compose_command("train", ["gpus=emptiest", "strategy=ddp", "model=mlp"])
            refusal = pytest.raises(UserError, match="without torchrun or srun")
            with refusal if is_refused else nullcontext():
                check(composed)


@pytest.mark.gpu
def test_real_gpu_is_chosen_and_becomes_cuda_0(own_locks: str) -> None:
    code = (
        "import sys; from harness import devices as choice\n"
        "choice.PREFIX = sys.argv[1]; gpu, = choice.choose_emptiest(1)\n"
        "import torch; print(gpu.uuid, torch.cuda.get_device_properties(0).uuid)\n"
        "assert torch.cuda.device_count() == 1"
    )
    result = command("-c", code, own_locks)
    assert result.returncode == 0, result.stderr
    ours, cudas = result.stdout.split()
    assert ours.removeprefix("GPU-") == cudas
