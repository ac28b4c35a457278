"""Two GPUs, with NCCL between their processes, train what the CPU trains."""

import signal
from pathlib import Path

import pytest
import torch

from tests.faults.fork_server import command
from tests.faults.run_folder import leave_at
from tests.gpu.runs import (
    DOUBLE,
    GPU,
    IS_GPU,
    TINY,
    assert_near,
    assert_same,
    last,
    log_of,
    on_cpu,
    run,
    stopped,
)
from tests.gpu.test_runs import KEEPS
from tests.gpu.test_waits import SHORT, WAITS

pytestmark = pytest.mark.multi_gpu
TWO = (GPU[0], "trainer.devices=2")


@pytest.mark.parametrize("strategy", ["ddp", "dp", "ddp2", "fsdp"])
@pytest.mark.parametrize(
    "overrides", [(), ("trainer.accumulate_grad_batches=2",)], ids=["whole", "accumulated"]
)
def test_two_gpus_train_what_the_cpu_trains(
    strategy: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    found = run(tmp_path, *TINY, DOUBLE, *overrides, f"strategy={strategy}", *TWO)
    assert_same(found, on_cpu(*TINY, DOUBLE, *overrides))
    assert "AccumulateGrad" not in log_of(found)


@pytest.mark.parametrize("overrides", [("callbacks=ema",), ("trainer.precision=bf16-mixed",)])
def test_a_feature_trains_under_ddp(overrides: tuple[str, ...], tmp_path: Path) -> None:
    found = run(tmp_path, *TINY, *overrides, "strategy=ddp", *TWO)
    bound = 5e-2 if "bf16" in overrides[0] else 1e-4
    assert_near(found, on_cpu(*TINY, *overrides), bound)


def test_a_killed_run_of_two_resumes_with_two_and_with_one(tmp_path: Path) -> None:
    overrides = (*TINY, DOUBLE, "trainer.max_epochs=20", "checkpoint.every_n_steps=2")
    folder = stopped(tmp_path, signal.SIGKILL, *overrides, "strategy=ddp", *TWO)
    assert command("train.py", f"resume={folder}").returncode == 0
    expected = on_cpu(*overrides)
    assert_same(folder, expected)
    kept = run(tmp_path / "kept", *TINY, DOUBLE, *KEEPS, "strategy=ddp", *TWO)
    leave_at(kept, 5)
    assert command("train.py", f"resume={kept}", "strategy=auto", *GPU).returncode == 0
    assert_same(kept, on_cpu(*TINY, DOUBLE))


def test_no_step_of_ddp_waits(tmp_path: Path) -> None:
    """Neither for the device nor in a barrier."""
    for overrides in (
        ("experiment=text", "data.length=32"),
        ("experiment=synthetic", "callbacks=ema"),
    ):
        overrides += (
            *SHORT,
            WAITS,
            f"+callbacks.waits.folder={tmp_path}",
            f"output_dir={tmp_path}",
        )
        result = command("train.py", *overrides, "strategy=ddp", *TWO)
        assert result.returncode == 0, result.stdout + result.stderr
        for rank in range(2):
            assert (tmp_path / f"waits_{rank}.json").read_text() == "{}"


@pytest.mark.skipif(not IS_GPU, reason="the CPU has one device")
def test_gpus_are_chosen_by_number(tmp_path: Path) -> None:
    found = run(tmp_path, *TINY, DOUBLE, GPU[0], "trainer.devices=[1]")
    assert_same(found, on_cpu(*TINY, DOUBLE))
    assert torch.cuda.device_count() >= 2
    assert last(found)["global_step"] > 0
