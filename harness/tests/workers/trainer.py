"""A small Trainer for tests that run in processes of their own."""

from typing import Any

import pytorch_lightning as pl

from harness.parity.combine_values import RankCombiner
from harness.parity.global_batches import GlobalBatches
from harness.parity.seeded_steps import SeededSteps
from harness.training.attachments import Attachments


def small_trainer(devices: int = 1, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A Trainer on CPUs with the library's callbacks for exact batches, and few others."""
    return pl.Trainer(
        devices=devices,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[
            Attachments(),
            GlobalBatches(seed=0),
            SeededSteps(seed=0),
            RankCombiner(),
            *callbacks,
        ],
        **{"accelerator": "cpu", "strategy": "ddp" if devices > 1 else "auto", "logger": False}
        | settings,
    )
