from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.trainer import call

from harness.upstream import idle_hooks

FUNCTIONS = "_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of a small run

HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]


@pytest.fixture(autouse=True)
def lightning_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FUNCTIONS:
        monkeypatch.setattr(call, name, getattr(call, name))


class Recorder(pl.Callback):
    """Note every hook, with what the module believes to run."""

    def __init__(self, calls: list[Any]) -> None:
        for name in HOOKS:
            setattr(self, name, self.note(name, calls))  # as LambdaCallback does

    def note(self, name: str, calls: list[Any]) -> Any:
        def hook(trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
            calls.append((name, len(args), module._current_fx_name))

        return hook


class SomeHooks(pl.Callback):
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.calls.append(("some", len(args), pl_module._current_fx_name))


class Module(BoringModel):
    calls: list[Any]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append(("training_step", batch_idx, self._current_fx_name))
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.calls.append(("module", batch_idx, self._current_fx_name))
        return -1 if batch_idx == 3 else None


def calls_of_a_run(folder: Path, **kwargs: Any) -> tuple[list[Any], torch.Tensor]:
    calls: list[Any] = []
    pl.seed_everything(1, verbose=False)
    module = Module()
    module.calls = calls
    checkpoint = pl.callbacks.ModelCheckpoint(folder, monitor="loss")
    callbacks = [Recorder(calls), checkpoint, SomeHooks(calls)]
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=5,
        limit_val_batches=2,
        val_check_interval=2,
        logger=False,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **kwargs,
    )
    loader = torch.utils.data.DataLoader(torch.randn(16, 32), batch_size=2)
    trainer.fit(module, loader, loader)
    return calls, module.layer.weight.detach()


def test_the_same_calls_in_the_same_order(tmp_path: Path) -> None:
    """Also of callbacks whose hooks belong to the object, as LambdaCallback's do."""
    expected, weights = calls_of_a_run(tmp_path)
    idle_hooks.skip_idle_hooks()
    calls, same_weights = calls_of_a_run(tmp_path)
    assert calls == expected
    assert {name for name, *_ in calls} >= {"on_before_zero_grad", "some", "on_validation_end"}
    assert torch.equal(weights, same_weights)


def test_lightning_goes_through_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loops call what was replaced, and with it nothing of what was there."""
    called = set()

    def noted(name: str) -> Any:
        function = getattr(idle_hooks, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(*args, **kwargs)

        return wrapper

    for name in ("call_callbacks", "call_module", "call_strategy"):
        monkeypatch.setattr(idle_hooks, name, noted(name))
    for name in ("of_callbacks", "of_module", "of_strategy"):
        monkeypatch.setattr(idle_hooks, name, None)  # fails where it is called
    idle_hooks.skip_idle_hooks()
    calls_of_a_run(tmp_path)
    assert called == {"call_callbacks", "call_module", "call_strategy"}


def test_a_profiler_sees_every_hook(tmp_path: Path) -> None:
    idle_hooks.skip_idle_hooks()
    profiler = SimpleProfiler()
    calls_of_a_run(tmp_path, profiler=profiler)
    assert "[Callback]SomeHooks.on_train_batch_end" in profiler.recorded_durations
    assert "[Callback]SomeHooks.on_train_batch_start" in profiler.recorded_durations


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [getattr(call, name) for name in FUNCTIONS]
    monkeypatch.setattr(pl, "__version__", "2.7.0")
    idle_hooks.skip_idle_hooks()
    assert [getattr(call, name) for name in FUNCTIONS] == before
