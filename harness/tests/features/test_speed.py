"""Faster steps are the same steps: no name, no promise and no other run's settings change."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from harness.checkpoints.reading import read
from harness.errors import UserError
from harness.features.speed import Speed, networks
from harness.training import summary
from tests.conftest import slow, train_command
from tests.faults.fork_server import command
from tests.faults.resume_sweep import COMMON
from tests.faults.run_folder import contents, differences, leave_at
from tests.features.runs import WITH_BUFFERS

CNN = ("model=cnn", "model.net.channels=[8,16]", "data=synthetic", "trainer.max_epochs=2")


class Module(pl.LightningModule):
    """Networks in a list, a metric, a loss without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.loss, self.accuracy = nn.MSELoss(), MulticlassAccuracy(3)


def prepared(module: pl.LightningModule, **switches: Any) -> Speed:
    callback = Speed(**switches)
    callback.setup(pl.Trainer(accelerator="cpu", logger=False), module, "fit")
    return callback


def test_tf32_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # given back afterwards
    for tf32 in (True, False):
        prepared(Module(), tf32=tf32)
        assert torch.backends.cudnn.allow_tf32 is tf32
    prepared(Module())
    assert said == ["high", "highest"]


@pytest.mark.parametrize(
    ("change", "is_shown"),
    {
        "nothing": True,
        "precision": False,
        "tf32": False,
        "capability": False,
        "matmul": False,
        "device": False,
    }.items(),
)
def test_the_start_says_what_tf32_would_give_where_nobody_has_decided(
    change: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu" if change == "device" else "cuda")
    capability = (7, 5) if change == "capability" else (8, 0)
    matmul = "high" if change == "matmul" else "highest"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=device),
        precision="bf16-mixed" if change == "precision" else "32-true",
    )
    cfg = OmegaConf.create({"tf32": False if change == "tf32" else None})
    assert summary.tf32_hint(cfg, trainer).startswith("; tf32=true multiplies") is is_shown


def test_networks_are_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's own classes too: else harness/upstream/networks.py is not needed."""
    runs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        def run(*tensors: torch.Tensor) -> Any:
            runs.append("compiled")
            return graph.forward(*tensors)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    module = Module()
    names = list(module.state_dict())
    prepared(module, compile=True)
    for size in (*range(8, 17), 8):  # more shapes than torch compiles by itself
        module.body(torch.rand(2, 3, size, size))
    assert len(runs) == 10
    assert list(module.state_dict()) == names
    copy.deepcopy(module).body(torch.rand(2, 3, 8, 8))  # of averages, which are not called
    assert len(runs) == 10


def test_what_cannot_be_compiled_is_told() -> None:
    assert [name for name, _ in networks(Module())] == ["heads.0", "heads.1", "body"]
    with pytest.raises(UserError, match="__init__ creates no submodule"):
        prepared(pl.LightningModule(), compile=True)


def test_convolutions_return_channels_last() -> None:
    module, x = Module(), torch.rand(2, 3, 8, 8)
    before = module.body(x)
    prepared(module, channels_last=True)
    after = module.body(x)
    assert after.is_contiguous(memory_format=torch.channels_last)
    assert not before.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(before, after, atol=1e-6)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_command(tmp_path_factory.mktemp("one"), *CNN, "trainer.precision=64-true")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("switch", "strategy"),
    [
        ("channels_last", "ddp"),
        *slow(("channels_last", "dp"), ("compile", "cpu"), ("compile", "dp"), ("compile", "ddp2")),
    ],
)
def test_a_faster_run_follows_the_plain_one(
    switch: str, strategy: str, one_process: Path, tmp_path: Path
) -> None:
    words = [f"{switch}=true", f"strategy={strategy}", "trainer.precision=64-true"]
    words += ["trainer.devices=2"] * (strategy != "cpu")
    other = train_command(tmp_path, *CNN, *words)
    states = [read(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (one_process, other)]
    for name, tensor in states[0].items():
        assert (tensor - states[1][name]).abs().max() <= 1e-9, name
    is_compiled = "Compiled at their first calls: net" in (other / "run.log").read_text()
    assert is_compiled == (switch == "compile")


@pytest.mark.slow
def test_compiled_run_goes_on_equal_by_bit_from_a_batch_of_another_size(tmp_path: Path) -> None:
    """BatchNorm's sums over a batch round otherwise where one kernel serves all sizes."""
    quiet = [word for word in COMMON if not word.startswith("model.net.")]
    run_dir = train_command(tmp_path, *quiet, *WITH_BUFFERS, "compile=true")
    reference = contents(run_dir)
    leave_at(run_dir, 4)  # before the smaller batch at the end of the first epoch
    result = command("train.py", f"resume={run_dir}")
    assert result.returncode == 0, result.stderr
    assert not differences(reference, contents(run_dir))
