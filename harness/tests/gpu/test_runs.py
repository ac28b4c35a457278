"""The commands of the README on a GPU: each ends as it does on the CPU, as far as numbers allow."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.convert import load
from tests.faults.fork_server import command
from tests.faults.run_folder import differences, leave_at
from tests.gpu.modules import wrong
from tests.gpu.runs import (
    CPU,
    DOUBLE,
    GPU,
    IS_GPU,
    QUIET,
    TINY,
    apart,
    assert_near,
    assert_same,
    last,
    log_of,
    on_cpu,
    run,
    stopped,
    two_nodes,
)

pytestmark = pytest.mark.gpu
GLOO = "+trainer.strategy.process_group_backend=gloo"  # NCCL wants a GPU for each process
KEEPS = ("checkpoint.every_n_steps=1", "checkpoint.num_kept=100")
SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=6", *QUIET)


@pytest.mark.parametrize("strategy", ["auto", "gpu", "ddp", "dp", "ddp2", "fsdp"])
def test_a_strategy_with_one_device_trains_what_the_cpu_trains(
    strategy: str, tmp_path: Path
) -> None:
    overrides = ("strategy=cpu",) if strategy == "gpu" and not IS_GPU else (f"strategy={strategy}",)
    found = run(tmp_path, *TINY, DOUBLE, *overrides, *GPU)
    assert_same(found, on_cpu(*TINY, DOUBLE))


@pytest.mark.parametrize("strategy", ["ddp", "ddp2"])
def test_two_processes_on_one_gpu_train_what_the_cpu_trains(strategy: str, tmp_path: Path) -> None:
    """Nor does torch warn of the streams in which the gradients are accumulated."""
    backend = (GLOO,) if IS_GPU else ()
    found = two_nodes(tmp_path, *TINY, DOUBLE, f"strategy={strategy}", *GPU, *backend)
    assert_same(found, on_cpu(*TINY, DOUBLE))
    said = "".join(path.read_text() for path in tmp_path.glob("said_*")) + log_of(found)
    assert "AccumulateGrad" not in said


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (("trainer.precision=32-true",), 1e-4),
        (("tf32=true",), 2e-2),
        (("trainer.precision=bf16-mixed",), 5e-2),
        (("trainer.precision=16-mixed", "trainer.gradient_clip_val=0.5"), 5e-2),
        (("trainer.precision=32-true", "channels_last=true"), 2e-2),  # convolutions take TF32
        (("trainer.precision=32-true", "trainer.gradient_clip_val=0.1"), 1e-4),
    ],
)
def test_a_precision_is_as_near_as_its_bits(
    overrides: tuple[str, ...], bound: float, tmp_path: Path
) -> None:
    if overrides[0].endswith("=16-mixed") and not IS_GPU:
        pytest.skip("16-mixed is for GPUs")
    cnn = ("model=cnn",) if "channels_last=true" in overrides else ()
    found = run(tmp_path, *TINY, *cnn, *overrides, *GPU)
    assert_near(found, on_cpu(*TINY, *cnn), bound)


@pytest.mark.parametrize(
    "overrides",
    [
        ("callbacks=ema", "callbacks.ema.decay=0.9"),
        ("trainer.accumulate_grad_batches=2",),
        ("data.max_samples_per_device=20",),
        ("model/scheduler=plateau", "callbacks=[early_stopping,top_k]"),
        ("data.num_workers=2",),
        ("model=cnn",),
        ("gpus=emptiest",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_a_feature_does_what_it_does_on_the_cpu(overrides: tuple[str, ...], tmp_path: Path) -> None:
    reference = () if overrides == ("gpus=emptiest",) else overrides
    found = run(tmp_path, *TINY, DOUBLE, *(overrides if IS_GPU else reference), *GPU)
    assert_same(found, on_cpu(*TINY, DOUBLE, *reference))


def test_a_compiled_run_is_near_and_resumes(tmp_path: Path) -> None:
    whole = run(tmp_path, *TINY, *KEEPS, "compile=true", *GPU)
    assert_near(whole, on_cpu(*TINY), 1e-4)
    state = last(whole)["state_dict"]
    leave_at(whole, 5)
    result = command("train.py", f"resume={whole}")
    assert result.returncode == 0, result.stderr
    for name, tensor in last(whole)["state_dict"].items():
        assert torch.allclose(tensor, state[name], atol=1e-6), name


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_resumes_to_the_same_bits(signum: int, tmp_path: Path) -> None:
    overrides = (*TINY, "trainer.max_epochs=30", "checkpoint.every_n_steps=2", *GPU)
    whole = run(tmp_path / "whole", *overrides)
    (tmp_path / "stopped").mkdir()
    folder = stopped(tmp_path / "stopped", signum, *overrides)
    result = command("train.py", f"resume={folder}")
    assert result.returncode == 0, result.stderr
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert not differences(last(folder)[key], last(whole)[key]), key


@pytest.mark.parametrize(("first", "second"), [(GPU, CPU), (CPU, GPU)], ids=["to_cpu", "to_gpu"])
def test_a_run_moves_between_gpu_and_cpu(first: Any, second: Any, tmp_path: Path) -> None:
    folder = run(tmp_path, *TINY, DOUBLE, *KEEPS, *first)
    leave_at(folder, 5)
    result = command("train.py", f"resume={folder}", *second)
    assert result.returncode == 0, result.stderr
    assert_same(folder, on_cpu(*TINY, DOUBLE))


def test_a_finished_run_is_evaluated_predicted_and_converted_on_both(tmp_path: Path) -> None:
    folder = run(tmp_path, *TINY, *GPU)
    best = folder / "checkpoints" / "best.ckpt"
    found, tables = [], []
    for i, device in enumerate((GPU[0], CPU[0])):
        overrides = (f"checkpoint={best}", device, f"output_dir={tmp_path / str(i)}")
        assert command("evaluate.py", *overrides).returncode == 0
        (path,) = (tmp_path / str(i)).rglob("results.json")
        found.append(json.loads(path.read_text()))
        table = tmp_path / f"{i}.csv"
        result = command("predict.py", f"checkpoint={best}", device, f"output={table}")
        assert result.returncode == 0, result.stderr
        numbers = [line.split(",") for line in table.read_text().splitlines()[1:]]
        tables.append(
            [[float(n) for n in row if re.fullmatch(r"-?[\d.e-]+", n)] for row in numbers]
        )
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert len(tables[0]) == len(tables[1]) > 0
    for a, b in zip(*tables, strict=True):
        assert a == pytest.approx(b, abs=1e-3)
    output = tmp_path / "weights.pt"
    result = command("scripts/convert_checkpoint.py", best, "-o", output)
    assert result.returncode == 0, result.stderr
    weights = torch.load(output, weights_only=True)  # without a GPU as well
    assert {str(tensor.device) for tensor in weights.values()} == {"cpu"}
    for name, tensor in load(best).items():
        assert torch.equal(tensor.cpu(), weights[name])


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("images") / "shapes"
    assert command("scripts/shapes.py", folder).returncode == 0
    sizes = ("data.size=16", "data.batch_size=8", "model.net.width=8", "model.net.stem=small")
    return (f"data.root={folder}", f"data.cache_dir={folder.parent}", *sizes)


@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=images",),
        ("experiment=table",),
        ("experiment=table_classes",),
        ("experiment=text", "data.length=32", "trainer.limit_val_batches=4"),
        ("experiment=contrastive", "data.batch_size=64", "trainer.limit_test_batches=2"),
        (),
    ],
    ids=["images", "table", "table_classes", "text", "contrastive", "default"],
)
def test_an_experiment_begins_as_on_the_cpu(
    overrides: tuple[str, ...], pictures: tuple[str, ...], tmp_path: Path
) -> None:
    """Six steps, and a validation."""
    overrides += (*SHORT, DOUBLE)
    overrides += pictures if overrides[0] == "experiment=images" else ()
    found, expected = run(tmp_path, *overrides, *GPU), on_cpu(*overrides)
    if overrides[0] == "experiment=contrastive":  # which draws its views on the device
        losses = [json.loads((one / "results.json").read_text()) for one in (found, expected)]
        assert losses[0]["train/loss"] == pytest.approx(losses[1]["train/loss"], abs=0.5)
    elif overrides[0] == "experiment=images":  # which are augmented on it, in single precision
        assert_near(found, expected, 1e-3)
    else:
        assert max(apart(found, expected).values()) <= 1e-5


def test_a_sweep_has_the_results_of_the_cpu(tmp_path: Path) -> None:
    found = []
    for i, device in enumerate((GPU, CPU)):
        overrides = (
            *TINY,
            DOUBLE,
            *device,
            "seed=1,2",
            f"output_dir={tmp_path / str(i)}",
            "name=run",
        )
        result = command("train.py", "-m", *overrides)
        assert result.returncode == 0, result.stdout + result.stderr
        paths = sorted((tmp_path / str(i)).rglob("results.json"))
        found.append([json.loads(path.read_text())["test/loss"] for path in paths])
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], abs=1e-9)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("hungry", "data.max_samples_per_device=<n> computes the same step in"),
        ("elsewhere", "Make tensors on self.device, or register them as buffers"),
        ("spoilt", "is not finite"),
    ],
)
def test_a_failure_of_the_device_is_a_clear_line(what: str, says: str, tmp_path: Path) -> None:
    if what == "elsewhere" and not IS_GPU:
        pytest.skip("the CPU has one device")
    result = command("train.py", *TINY, *GPU, *wrong(what), f"output_dir={tmp_path}")
    assert result.returncode == 1
    said = " ".join(result.stderr.split())
    assert says in said or (what == "spoilt" and "loss is nan" in said), result.stderr
    assert "Traceback (most" not in result.stderr
    assert len(result.stderr.splitlines()) <= 6


def test_the_readmes_first_commands_run(tmp_path: Path) -> None:
    for overrides in (
        ("debug=fast_dev_run",),
        ("debug=overfit", "trainer.max_epochs=2"),
        ("model=mlp", "data.batch_size=128", "trainer.max_epochs=1"),
        ("experiment=synthetic", "trainer.max_epochs=1"),
    ):
        device = (GPU[0],)
        result = command("train.py", *overrides, *QUIET[:1], *device, f"output_dir={tmp_path}")
        assert result.returncode == 0, result.stdout + result.stderr
    assert command("train.py", "--help").returncode == 0


def test_the_seed_decides_what_a_gpu_computes(tmp_path: Path) -> None:
    overrides = (*TINY, "model=cnn", "trainer.deterministic=true", *GPU)
    found = [last(run(tmp_path / name, *overrides))["state_dict"] for name in "ab"]
    assert not differences(*found)
