import inspect
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.demos.boring_classes import BoringModel
from pytorch_lightning.profilers import SimpleProfiler
from pytorch_lightning.trainer import call

from harness.upstream import step_overhead, versions

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of a small run

HOOKS = [name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]


@pytest.fixture(autouse=True)
def lightning_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_call_callback_hooks", step_overhead.original)


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


def calls_of_a_run(
    folder: Path, skips: bool = False, **kwargs: Any
) -> tuple[list[Any], torch.Tensor]:
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
    if skips:
        step_overhead.skip_empty_hooks(trainer)
    loader = torch.utils.data.DataLoader(torch.randn(16, 32), batch_size=2)
    trainer.fit(module, loader, loader)
    return calls, module.layer.weight.detach()


def test_the_same_calls_in_the_same_order(tmp_path: Path) -> None:
    """Also of callbacks whose hooks belong to the object, as LambdaCallback's do."""
    expected, weights = calls_of_a_run(tmp_path)
    calls, same_weights = calls_of_a_run(tmp_path, skips=True)
    assert call._call_callback_hooks is step_overhead.call_callbacks
    assert calls == expected
    assert {name for name, *_ in calls} >= {"on_before_zero_grad", "some", "on_validation_end"}
    assert torch.equal(weights, same_weights)


def test_a_profiler_sees_every_hook(tmp_path: Path) -> None:
    calls_of_a_run(tmp_path, skips=True)  # an earlier run of the same process
    profiler = SimpleProfiler()
    calls_of_a_run(tmp_path, skips=True, profiler=profiler)
    assert "[Callback]SomeHooks.on_train_batch_end" in profiler.recorded_durations
    assert "[Callback]SomeHooks.on_train_batch_start" in profiler.recorded_durations


def test_versions_that_were_not_tested_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "untested", lambda: ["pytorch-lightning"])
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    step_overhead.skip_empty_hooks(trainer)
    step_overhead.skip_sigterm_broadcast(trainer)
    assert call._call_callback_hooks is step_overhead.original
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(
        type(trainer.fit_loop.epoch_loop).advance
    )
    assert "_broadcast_sigterm_tensor" not in vars(trainer.fit_loop.epoch_loop)
