"""gpus=emptiest, against machines with the GPUs that a test needs."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.errors import UserError
from harness.machine import choice, locks, num_gpus, nvml
from tests_harness.conftest import command
from tests_harness.machine.fake_nvml import FakeGpu, FakeNvml, write_fake

pytestmark = pytest.mark.usefixtures("own_locks")


def chosen(num_wanted: int | None, min_free_gib: float = 0) -> str:
    """The numbers of the GPUs, which CUDA must see in this order."""
    numbers = [gpu.number for gpu in choice.choose_emptiest(num_wanted, min_free_gib)]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    return " ".join(numbers)


def visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_emptiest_come_first(machine) -> None:
    machine(*(FakeGpu(free) for free in (10, 70, 5, 80)))
    assert chosen(2) == "3 1"
    assert visible() == "3,1"


def test_of_equals_the_first_is_taken(machine) -> None:
    machine(*(FakeGpu(free) for free in (40, 80, 80, 80)))
    assert chosen(2) == "1 2"


def test_all_that_have_the_minimum_are_taken(machine) -> None:
    machine(FakeGpu(10), FakeGpu(70), FakeGpu(60))
    assert chosen(None, 20.5) == "1 2"


@pytest.mark.parametrize(
    ("value", "order", "expected", "seen"),
    [
        ("0,2", "PCI_BUS_ID", "2 0", "2,0"),
        ("0,2", None, "2 0", "2,0"),  # equal GPUs are counted alike in either order
        ("GPU-00ab-cdef,GPU-22ab-cdef", None, "2 0", "2,0"),
    ],
)
def test_choice_is_among_those_that_are_visible(
    value: str, order: str | None, expected: str, seen: str, machine, monkeypatch
) -> None:
    machine(*(FakeGpu(free) for free in (20, 80, 70, 80)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert chosen(len(expected.split())) == expected
    assert visible() == seen


@pytest.mark.parametrize("value", ["", "-1", "9", "1,1", "1,x", "GPU-00", "MIG-00aa", "2x"])
def test_variable_that_is_not_plain_is_refused(value: str, machine, monkeypatch) -> None:
    machine(FakeGpu(80), FakeGpu(80))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(UserError, match=f"CUDA_VISIBLE_DEVICES={value}, which must be"):
        choice.choose_emptiest(1)
    assert visible() == value


def test_numbers_in_an_order_that_nobody_knows_are_refused(machine, monkeypatch) -> None:
    """Without CUDA_DEVICE_ORDER, CUDA's 0 is the fastest GPU, and NVML's 0 may be another."""
    machine(FakeGpu(80, name="NVIDIA T4"), FakeGpu(80), FakeGpu(20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        choice.choose_emptiest(1)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert chosen(1) == "0"
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1,0")  # all of them, in whichever order
    assert chosen(3) == "1 0 2"  # of equals, the first that it names


def test_uuids_need_no_order(machine, monkeypatch) -> None:
    machine(FakeGpu(80, name="NVIDIA T4"), FakeGpu(80), FakeGpu(20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-22ab-cdef")
    assert chosen(1) == "2"


def test_minimum_counts_in_gib(machine) -> None:
    machine(FakeGpu(20))
    assert chosen(1, 20) == "0"
    machine(FakeGpu(19.9))
    with pytest.raises(UserError, match="less free than"):
        choice.choose_emptiest(1, 20)


def test_one_run_at_a_time_chooses(machine, monkeypatch, own_locks: str) -> None:
    """Else two that want all GPUs could each get a part of them, and neither start."""
    machine(FakeGpu(80))
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.0)
    with (
        held("choice", own_locks),
        pytest.raises(UserError, match="has been choosing"),
    ):
        choice.choose_emptiest(1)
    assert chosen(1) == "0"


def test_too_few_gpus_show_what_each_lacks(machine, monkeypatch, own_locks: str) -> None:
    machine(
        FakeGpu(79.1, name="T4"),
        FakeGpu(3.2, name="T4"),
        FakeGpu(79, name="T4"),
        FakeGpu(80, name="T4", compute_mode=FakeNvml.NVML_COMPUTEMODE_PROHIBITED),
        FakeGpu(78, name="T4"),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with held("GPU-22ab-cdef", own_locks), pytest.raises(UserError) as caught:
        choice.choose_emptiest(2, 20)
    assert str(caught.value).splitlines() == [
        "gpus=emptiest looked for 2, and 1 can be had:",
        "  GPU 0    T4    79.1 GiB of   80.0 GiB free  free",
        "  GPU 1    T4     3.2 GiB of   80.0 GiB free  less free than gpus.min_free_gib=20",
        "  GPU 2    T4    79.0 GiB of   80.0 GiB free  taken by another run",
        "  GPU 3    T4    80.0 GiB of   80.0 GiB free  computing is prohibited on it",
        "  GPU 4    T4    78.0 GiB of   80.0 GiB free  hidden by CUDA_VISIBLE_DEVICES=0,1,2,3",
        "Use fewer trainer.devices or a smaller gpus.min_free_gib, or wait for other runs to end.",
    ]
    assert visible() == "0,1,2,3"
    assert locks.HELD == {}


def test_more_gpus_than_there_are(machine) -> None:
    machine(FakeGpu(80))
    with pytest.raises(UserError, match="looked for 2, and 1 can be had"):
        choice.choose_emptiest(2)
    with pytest.raises(UserError, match="looked for 1, and 0 can be had"):
        choice.choose_emptiest(None, 100)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_machine_without_gpus(machine) -> None:
    machine()
    with pytest.raises(UserError, match="no GPU"):
        choice.check()


def test_no_driver_is_told(machine) -> None:
    machine(error=FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(UserError, match="no NVIDIA driver is installed here"):
        choice.check()
    machine(error=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED)
    with pytest.raises(UserError, match="modprobe"):
        choice.choose_emptiest(1)


def test_uuids_are_used_where_cuda_may_count_otherwise(machine) -> None:
    machine(FakeGpu(80, lost=True), FakeGpu(10), FakeGpu(20))
    assert chosen(2) == "2 1"
    assert visible() == "GPU-22ab-cdef,GPU-11ab-cdef"


def test_second_choice_in_a_process_replaces_the_first(machine, monkeypatch) -> None:
    machine(FakeGpu(80), FakeGpu(70))
    assert chosen(1) == "0"
    assert chosen(1) == "0"
    assert list(locks.HELD) == ["GPU-00ab-cdef"]


def test_choice_after_cuda_has_started_is_refused(machine, monkeypatch) -> None:
    machine(FakeGpu(80))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA has started"):
        choice.choose_emptiest(1)


class held:  # noqa: N801  (reads as a word in a with statement)
    """Another process that has locked a GPU."""

    def __init__(self, uuid: str, prefix: str) -> None:
        code = (
            "import sys, time; from harness.machine import locks\n"
            "locks.PREFIX = sys.argv[1]\n"
            "print(locks.acquire(sys.argv[2]), flush=True)\n"
            "time.sleep(60)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, prefix, uuid], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> int:
        assert self.process.stdout.readline() == "True\n"
        return self.process.pid

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_runs_that_start_together_take_different_gpus(tmp_path: Path, own_locks: str) -> None:
    """Six at once on four GPUs: four get one each, two are told."""
    gpus = write_fake(tmp_path / "fake", [FakeGpu(80 - free) for free in range(4)])
    code = (
        "import sys; from harness.machine import choice, locks\n"
        "locks.PREFIX = sys.argv[1]; print('ready', flush=True); input()\n"
        "try: print(choice.choose_emptiest(1)[0].number, flush=True)\n"
        "except Exception as error: print(type(error).__name__, flush=True)\n"
        "input()"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, own_locks],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
            env=os.environ | gpus,
        )
        for _ in range(6)
    ]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    answers = sorted(run.stdout.readline().strip() for run in runs)
    for run in runs:
        run.communicate("\n")
    assert answers == ["0", "1", "2", "3", "UserError", "UserError"]


# The commands: a model that writes down what its process may see.

SPY = """
import os, sys
from project.models.mlp import MLP
class Spy(MLP):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        with open(os.environ["SPY"], "a") as file:
            visible, order = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["CUDA_DEVICE_ORDER"]
            file.write(f"{os.environ.get('LOCAL_RANK', 0)} {visible} {order}\\n")
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run train.py on four fake GPUs. torch knows that there are none, and computes on the CPU."""
    variables = write_fake(tmp_path / "fake", [FakeGpu(free) for free in (10, 70, 5, 80)])
    (tmp_path / "fake" / "spy.py").write_text(SPY)
    variables["SPY"] = str(tmp_path / "spy.txt")
    arguments = ["model=mlp", "model.net._target_=spy.Spy", f"output_dir={tmp_path / 'out'}"]
    arguments += ["trainer.fast_dev_run=true", "gpus=emptiest"]

    def run(*more: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        result = command("train.py", *arguments, *more, environment=variables | environment)
        spied = tmp_path / "spy.txt"
        return result, sorted(spied.read_text().splitlines()) if spied.exists() else []

    return run


def test_ddp_processes_inherit_the_choice(commands, tmp_path: Path) -> None:
    result, spied = commands("strategy=ddp", "trainer.devices=2")
    assert result.returncode == 0, result.stderr
    assert spied == ["0 3,1 PCI_BUS_ID", "1 3,1 PCI_BUS_ID"]
    (run_log,) = (tmp_path / "out").rglob("run.log")
    assert "CUDA_VISIBLE_DEVICES=3,1" in run_log.read_text()
    assert result.stdout.count("cuda:") == 2  # one process chose and said so
    assert "cuda:0 is GPU 3: NVIDIA H100, 80.0 GiB of 80.0 GiB free" in result.stdout
    assert "cuda:1 is GPU 1" in result.stdout


def test_each_job_of_a_sweep_chooses(commands) -> None:
    result, spied = commands("-m", "seed=1,2")
    assert result.returncode == 0, result.stderr
    assert spied == ["0 1 PCI_BUS_ID", "0 3 PCI_BUS_ID"]  # side by side, each on its own


def test_choice_comes_before_torch(commands, tmp_path: Path) -> None:
    (tmp_path / "fake" / "torch.py").write_text("raise SystemExit('torch was imported')")
    result, _ = commands("trainer.devices=2")
    assert "cuda:1 is GPU 1" in result.stdout
    assert "torch was imported" in result.stderr


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "hint"),
    [
        (TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "2 were started"),
        (SRUN, "4 were started"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "Change or unset it"),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, "gpus.min_free_gib"),
    ],
)
def test_choice_that_cannot_be_made_is_refused_and_leaves_nothing(
    environment: dict[str, str], hint: str, commands, tmp_path: Path
) -> None:
    (tmp_path / "fake" / "torch.py").write_text("raise SystemExit('torch was imported')")
    result, _ = commands("gpus.min_free_gib=20", "strategy=ddp", **environment)
    assert result.returncode == 1
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("config.yaml"))


def test_each_machine_of_a_run_tells_what_it_lacks(commands, tmp_path: Path) -> None:
    """The first machine's process does not have this mistake, and lives on."""
    second = {"RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    result, _ = commands("strategy=ddp", **TORCHRUN, **second, CUDA_VISIBLE_DEVICES="")
    assert result.stderr.startswith("Rank 1: ")
    assert "which must be numbers" in result.stderr


@pytest.mark.parametrize("launched", [{}, {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "1(x2)"}])
def test_process_that_is_alone_on_its_machine_may_choose(launched, monkeypatch) -> None:
    from harness.processes.launcher import launcher

    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert launcher().num_here == 1


@pytest.mark.parametrize("config", ["train", "evaluate", "predict"])
def test_every_command_can_choose(config: str, tmp_path: Path) -> None:
    from harness.command import run_folder
    from harness.command.compose import compose

    run_folder.save_config(run_folder.freeze(compose("train", []), tmp_path), tmp_path)
    (tmp_path / "checkpoints").mkdir()
    torch.save({"state_dict": {}}, tmp_path / "checkpoints" / "best.ckpt")
    checkpoint = f"checkpoint={tmp_path / 'checkpoints' / 'best.ckpt'}"
    overrides = ["gpus=emptiest", *([checkpoint] if config != "train" else [])]
    assert compose(config, overrides).gpus == {"order": "emptiest", "min_free_gib": 0}
    assert compose(config, overrides[1:]).gpus.order == "visible"


@pytest.mark.gpu
def test_real_gpu_is_chosen_and_becomes_cuda_0(own_locks: str) -> None:
    code = (
        "import sys; from harness.machine import choice, locks\n"
        "locks.PREFIX = sys.argv[1]; gpu, = choice.choose_emptiest(1)\n"
        "import torch; print(gpu.uuid, torch.cuda.get_device_properties(0).uuid)\n"
        "assert torch.cuda.device_count() == 1"
    )
    result = command("-c", code, own_locks)
    assert result.returncode == 0, result.stderr
    ours, cudas = result.stdout.split()
    assert ours.removeprefix("GPU-") == cudas


@pytest.mark.multi_gpu
def test_real_gpus_are_in_the_order_of_their_free_memory(own_locks: str) -> None:
    before = {gpu.uuid: gpu.free_bytes for gpu in nvml.gpus()}
    found = choice.choose_emptiest(2)
    free = [before[gpu.uuid] for gpu in found]
    assert free == sorted(free, reverse=True)
    assert free[0] == max(before.values())


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
