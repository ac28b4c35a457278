"""Faster steps are the same steps: no name, no promise and no other run's settings change."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from harness.checkpoints.reading import read
from harness.command.compose import compose
from harness.convert import load
from harness.errors import UserError
from harness.knobs.speed import Speed, networks
from tests.conftest import slow
from tests.faults.fork_server import command
from tests.faults.resume_sweep import COMMON, train
from tests.faults.run_folder import contents, differences, leave_at

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


def test_compiled_networks_are_called_and_names_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[int, ...]] = []

    def compiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> Any:
            calls.append(tuple(x.shape))
            return function(x)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    train(compose("train", [*COMMON, "compile=true", f"run_dir={tmp_path / 'compiled'}"]))
    assert len(calls) > 15  # each step, validation and test
    calls.clear()
    train(compose("train", [*COMMON, f"run_dir={tmp_path / 'plain'}"]))
    assert not calls
    kept = [read(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("compiled", "plain")]
    for name, tensor in kept[0]["state_dict"].items():
        assert torch.equal(tensor, kept[1]["state_dict"][name])


def test_networks_of_torchs_own_classes_are_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
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
    for size in (8, 9, 8):
        module.body(torch.rand(2, 3, size, size))
    assert len(runs) == 3
    assert list(module.state_dict()) == names
    copy.deepcopy(module).body(torch.rand(2, 3, 8, 8))  # of averages, which are not called
    assert len(runs) == 3


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, _ in networks(Module())] == ["heads.0", "heads.1", "body"]
    with pytest.raises(UserError, match="LightningModule has no network"):
        prepared(pl.LightningModule(), compile=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="no-such-compiler is not there"):
        prepared(Module(), compile=True)


def test_convolutions_return_channels_last() -> None:
    module, x = Module(), torch.rand(2, 3, 8, 8)
    before, names = module.body(x), list(module.state_dict())
    prepared(module, channels_last=True)
    after = module.body(x)
    assert not before.is_contiguous(memory_format=torch.channels_last)
    assert after.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(before, after, atol=1e-6)
    assert list(module.state_dict()) == names


def test_tf32_is_set_for_the_run_and_given_back() -> None:
    def state() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before, trainer = state(), pl.Trainer(accelerator="cpu", logger=False)
    for tf32, name in ((True, "high"), (False, "highest")):
        callback = prepared(Module(), tf32=tf32)
        assert state() == (name, tf32)
        callback.teardown(trainer, Module(), "fit")
        assert state() == before
    prepared(Module(), tf32=None)
    assert state() == before


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("one"))


def trained(folder: Path, *words: str) -> Path:
    precise = ("trainer.precision=64-true",)
    result = command("train.py", *CNN, *precise, *words, f"output_dir={folder}")
    assert result.returncode == 0, result.stderr
    (run_dir,) = (folder / "default").iterdir()
    return run_dir


@pytest.mark.parametrize("strategy", ["ddp", *slow("dp")])
def test_channels_last_trains_the_same_under_every_strategy(
    strategy: str, one_process: Path, tmp_path: Path
) -> None:
    other = trained(tmp_path, "channels_last=true", f"strategy={strategy}", "trainer.devices=2")
    kept = [read(run / "checkpoints" / "last.ckpt")["state_dict"] for run in (one_process, other)]
    for name, tensor in kept[0].items():
        assert (tensor - kept[1][name]).abs().max() <= 1e-12, name
    assert load(other / "checkpoints" / "best.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["cpu", "ddp", "dp", "ddp2"])
def test_compiled_run_follows_the_plain_one_and_is_evaluated_compiled(
    strategy: str, one_process: Path, tmp_path: Path
) -> None:
    words = [f"strategy={strategy}"] + ["trainer.devices=2"] * (strategy != "cpu")
    other = trained(tmp_path, "compile=true", "callbacks=ema", *words)
    kept = [read(run / "checkpoints" / "last.ckpt") for run in (one_process, other)]
    raw = kept[1]["current_model_state"]
    for name, tensor in kept[0]["state_dict"].items():
        assert (tensor - raw[name]).abs().max() <= 1e-9, name
    assert "Compiled at their first call: net" in (other / "run.log").read_text()
    best = other / "checkpoints" / "best.ckpt"
    result = command("evaluate.py", f"checkpoint={best}", f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    (again,) = tmp_path.glob("evaluate/*/results.json")
    results = json.loads((other / "results.json").read_text())
    tested = {name: value for name, value in results.items() if name.startswith("test/")}
    assert json.loads(again.read_text()) == tested
    assert "Compiled at their first call: net" in (again.parent / "run.log").read_text()


@pytest.mark.slow
def test_compiled_run_goes_on_equal_by_bit_from_a_batch_of_another_size(tmp_path: Path) -> None:
    """BatchNorm's sums over a batch round otherwise where one kernel serves all sizes."""
    quiet = [word for word in COMMON if not word.startswith("model.net.")]
    network = "model.net._target_=tests.knobs.networks.WithBuffers"
    words = (*quiet, network, "~model.net.hidden", "~model.net.dropout", "+model.net.num_hidden=64")
    result = command("train.py", *words, "compile=true", f"output_dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    (run_dir,) = (tmp_path / "default").iterdir()
    reference = contents(run_dir)
    leave_at(run_dir, 4)  # before the smaller batch at the end of the first epoch
    result = command("train.py", f"resume={run_dir}")
    assert result.returncode == 0, result.stderr
    assert not differences(reference, contents(run_dir))
