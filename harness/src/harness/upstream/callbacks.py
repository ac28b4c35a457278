"""A Trainer's callbacks with their type: Lightning 2.6 sets the attribute where mypy sees none."""

import pytorch_lightning as pl


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks, in the order in which they are called."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
