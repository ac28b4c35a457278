"""The callback that seeds each batch, and the search for dropout in a module.

Draws depend on the run's seed and the batch's place alone: nothing needs to be saved for a resumed
run to draw the same, and an evaluation draws the same on any number of processes.
"""

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from harness.data.randomness import mix, seed_generators

DROPOUTS: tuple[type[nn.Module], ...] = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUTS += (nn.AlphaDropout, nn.FeatureAlphaDropout)


class SeededSteps(pl.Callback):
    """Seed a training batch by (seed, epoch, batch, rank), and an evaluation's by its place.

    That place is in the whole loader, whose batches several processes evaluate in turn. Neither
    validation nor logging can then disturb the training. About 20 microseconds a batch.

    Args:
        seed: the run's seed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed Python, NumPy, torch, and this process's devices."""
        self._seed(pl_module, trainer.current_epoch, batch_idx, trainer.global_rank)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed draws before the first batch."""
        self._seed_evaluation(trainer, pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Seed as one process would for this batch."""
        place = batch_idx * trainer.world_size + trainer.global_rank
        self._seed_evaluation(trainer, pl_module, dataloader_idx, place)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _seed_evaluation(
        self, trainer: pl.Trainer, module: pl.LightningModule, *place: int
    ) -> None:
        # No epoch is -1. A test draws the same after a training as later on.
        self._seed(module, -1, trainer.global_step * trainer.validating, *place)

    def _seed(self, module: pl.LightningModule, *numbers: int) -> None:
        seed = mix(self.seed, *numbers)
        seed_generators(seed)
        if module.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)


def dropouts(module: nn.Module, switch_off: bool) -> Iterator[str]:
    """Iterate over the names of dropout in a module, with its share; switch it off if asked."""
    for name, part in module.named_modules():
        keys = [key for key in vars(part) if "drop" in key.lower()]
        keys += ["p"] if isinstance(part, DROPOUTS) else []
        for key in keys:
            value = getattr(part, key)
            if isinstance(value, float) and 0 < value <= 1:
                yield f"{name or type(part).__name__}.{key}={value:g}"
                if switch_off:
                    setattr(part, key, 0.0)
