"""Apple's GPU is one device without double precision. A CPU stands in for it here."""

import platform
import sys
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import kinds
from harness.command.check import check
from harness.command.compose import compose_command
from harness.monitoring.non_finite import first_bad_weight
from harness.parity.mean_over import outside_of_training
from harness.parity.snapshot import Snapshot
from harness.training import train as run
from tests.monitoring.test_replicas import SHORT
from tests.refusals import refusal

# Functions whose tensors are on the CPU by intention; the last is that of loaders.
ON_HOST = {"kind_of", "merge", "numbers", "_next_data"}


class WithoutFloat64(TorchDispatchMode):
    """Refuse double precision as mps does, except in functions of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.dtype == torch.float64 for t in made) and not called_by(ON_HOST):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


def called_by(names: set[str]) -> bool:
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in names:
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def cpu_is_apples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "WITHOUT_FLOAT64", {"mps", "cpu"})


def test_a_run_asks_its_device_for_no_double_precision(make_cfg, cpu_is_apples) -> None:
    words = ("strategy=cpu", "trainer.enable_progress_bar=false", "checkpoint.every_n_steps=1")
    watched = ("callbacks=ema", "trainer.accumulate_grad_batches=2", "trainer.max_epochs=2")
    cfg = make_cfg(*SHORT, *words, *watched)
    with WithoutFloat64():
        run.train(cfg)


def test_sums_are_single_precision_on_the_device_and_double_elsewhere(monkeypatch) -> None:
    module = pl.LightningModule()
    module.layer = torch.nn.Linear(3, 2)
    weights = [weight.detach() for weight in module.parameters()]
    doubled = [float(weight.double().sum()) for weight in weights]
    assert sorted(doubled) == sorted(eval(Snapshot(module).fingerprint()[0]))
    number = torch.tensor(3.0, dtype=torch.float64)
    third = outside_of_training(torch.ones(()), number, 1.0)
    monkeypatch.setattr(kinds, "WITHOUT_FLOAT64", {"mps", "cpu"})
    with WithoutFloat64():
        assert first_bad_weight(module) is None
        Snapshot(module).fingerprint()
        assert torch.equal(outside_of_training(torch.ones(()), number, 1.0), third)
        weights[0][0, 0] = torch.inf
        assert first_bad_weight(module) == "layer.weight"


def test_several_devices_and_double_precision_are_refused_on_apple_silicon(monkeypatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    for words in ("strategy=ddp", "strategy=dp", "strategy=fsdp", "trainer.devices=2"):
        said = refusal("model=mlp", words)
        assert "Use strategy=auto, or trainer.accelerator=cpu" in said, words
        assert len(said.splitlines()) == 2
        check(compose_command("train", ["model=mlp", words, "trainer.accelerator=cpu"]))
    assert "Use trainer.precision=32-true" in refusal("model=mlp", "trainer.precision=64-true")
    for words in ("strategy=auto", "strategy=gpu", "trainer.devices=[0]", "trainer.devices=auto"):
        check(compose_command("train", ["model=mlp", words]))
