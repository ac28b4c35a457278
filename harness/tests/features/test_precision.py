"""Gradients are clipped in bf16-mixed with a fused optimizer too, as no scaler has changed them."""

from pathlib import Path

import pytest
import torch

from harness.checkpoints.reading import read
from harness.command.compose import compose
from harness.training import attachments
from tests.faults.resume_sweep import COMMON, train
from tests.strategy_runs import farthest

WORDS = (
    "trainer.precision=bf16-mixed",
    "model.optimizer._target_=torch.optim.SGD",
    "model/scheduler=constant",
    "trainer.max_epochs=1",
)


def weights(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    train(compose("train", [*COMMON, *WORDS, *words, f"run_dir={folder}"]))
    found: dict[str, torch.Tensor] = read(folder / "checkpoints" / "last.ckpt")["state_dict"]
    return found


def test_bf16_clips_with_a_fused_optimizer_as_without(tmp_path: Path) -> None:
    clip = "trainer.gradient_clip_val=0.01"
    fused = weights(tmp_path / "fused", clip)
    plain = weights(tmp_path / "plain", clip, "model.optimizer.fused=false")
    unclipped = weights(tmp_path / "unclipped")
    assert farthest(fused, plain) <= 1e-6
    assert farthest(fused, unclipped) > 1e-4


def test_lightning_still_refuses_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else harness/compat/precision.py is not needed any more."""
    monkeypatch.setattr(attachments, "clip_without_scaler", lambda trainer: None)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        weights(tmp_path, "trainer.gradient_clip_val=0.01")
