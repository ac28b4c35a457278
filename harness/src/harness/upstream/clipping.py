"""Lets a fused optimizer's gradients be clipped in bf16-mixed, where Lightning 2.6 refuses it.

A fused optimizer divides gradients by the gradient scaler's factor inside of its step, and what is
clipped before is scaled still. Only 16-mixed has a scaler; Lightning does not ask for one.
``harness/tests/knobs/test_precision.py`` fails where the repair is not needed.
"""

from functools import partial

import pytorch_lightning as pl
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.plugins.precision import Precision

PRIVATE: dict[str, str] = {}  # a repair by public names


def allow_without_scaler(trainer: pl.Trainer) -> None:
    """Clip as in single precision where no scaler has scaled anything."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
        plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]
