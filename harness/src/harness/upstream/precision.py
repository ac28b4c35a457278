"""Two repairs of Lightning 2.6 for precisions; both by public names.

Lightning loads a checkpoint into single precision before it makes the module double, and rounds
every weight (``harness/tests/checkpoints/test_resume.py``). And it refuses to clip the gradients of
a fused optimizer in bf16-mixed, for the sake of a gradient scaler that only 16-mixed has
(``harness/tests/knobs/test_precision.py``).
"""

from functools import partial

import pytorch_lightning as pl
from pytorch_lightning.plugins import DoublePrecision, MixedPrecision
from pytorch_lightning.plugins.precision import Precision

PRIVATE: dict[str, str] = {}


def double_before_loading(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Make a module double before its weights are loaded; call it in ``setup``."""
    if isinstance(trainer.precision_plugin, DoublePrecision):
        module.double()


def clip_without_scaler(trainer: pl.Trainer) -> None:
    """Clip as in single precision where no scaler has scaled anything."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
        plugin.clip_gradients = partial(Precision.clip_gradients, plugin)  # type: ignore[method-assign]
