"""Damages the best checkpoint of a run between its training and its test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from tests.faults.damage import value_bytes


def flip(path: Path) -> None:
    """Flip a bit of the exponent of a weight: torch loads it without a word."""
    data = bytearray(path.read_bytes())
    data[value_bytes(data, "/data/0")[3]] ^= 64
    path.write_bytes(data)


KINDS: dict[str, Callable[[Path], Any]] = {
    "flipped bit": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-500]),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(missing_ok=True),
}


class Harm(pl.Callback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            KINDS[self.kind](Path(trainer.checkpoint_callback.best_model_path))  # type: ignore[union-attr]
